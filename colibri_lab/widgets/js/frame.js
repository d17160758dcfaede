// The kernel's block of bytes (see colibri_lab/view/frame.py) as typed arrays, without copying where alignment allows.
const TYPES = {u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f4: Float32Array};

function parseFrame(view) {
  if (!view || view.byteLength < 8) return null;
  const buffer = view.buffer, start = view.byteOffset || 0;
  if (new TextDecoder().decode(new Uint8Array(buffer, start, 4)) !== "CLB1") return null;
  const length = new DataView(buffer, start).getUint32(4, true);
  const frame = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, start + 8, length)));
  let at = start + 8 + length;
  frame.a = {};
  for (const [name, type, shape] of frame.arrays) {
    const Type = TYPES[type], count = shape.reduce((x, y) => x * y, 1), size = count * Type.BYTES_PER_ELEMENT;
    const source = at % Type.BYTES_PER_ELEMENT ? buffer.slice(at, at + size) : buffer;
    frame.a[name] = new Type(source, source === buffer ? at : 0, count);
    frame.a[name].shape = shape;
    at += size + (4 - size % 4) % 4;
  }
  return frame;
}

// The pieces of text of one sequence, in order; says whether some were missed on the way.
class Story {
  constructor() { this.end = Infinity; this.clear(-1); }
  // the pieces that were there at the moment that is shown: an earlier one hides the later pieces
  get told() { const n = this.pieces.length; return n && this.pieces[n - 1].at > this.end ? this.pieces.filter((piece) => piece.at <= this.end) : this.pieces; }
  clear(sequence, epoch = 0) { this.sequence = sequence; this.epoch = epoch; this.pieces = []; this.prompt = ""; this.revision = (this.revision || 0) + 1; }
  take(frame) {
    const text = frame && frame.text;
    const again = text && text.epoch !== this.epoch;  // a recorded run that begins anew
    if (!text || (!again && text.sequence < this.sequence)) return true;
    if (again || text.sequence > this.sequence) this.clear(text.sequence, text.epoch);
    if (text.prompt !== undefined) this.prompt = text.prompt;
    this.end = text.end;
    const route = frame.a.route, [, layers, k] = route.shape, width = layers * k;
    const last = this.pieces.length ? this.pieces[this.pieces.length - 1].at : -1;
    const whole = !text.at.length || text.before <= last;
    text.at.forEach((at, i) => {
      if (at <= last) return;
      this.pieces.push({at, text: text.piece[i], k, route: route.slice(i * width, (i + 1) * width), none: route.BYTES_PER_ELEMENT === 1 ? 255 : 65535});
    });
    if (this.pieces.length > 1200) this.pieces.splice(0, this.pieces.length - 800);
    return whole;
  }
  replace(frame) {
    if (!frame) return;
    const text = frame.text, known = text.epoch === this.epoch, same = known && text.sequence === this.sequence;
    if (known && text.sequence < this.sequence) return;
    const later = this.pieces;
    this.clear(text.sequence, text.epoch);
    this.take(frame);
    const last = this.pieces.length ? this.pieces[this.pieces.length - 1].at : -1;
    if (same) this.pieces.push(...later.filter((piece) => piece.at > last));
  }
  find(at) { return this.pieces.find((piece) => piece.at === at) || null; }
}

// does a token's route hold this expert of this layer?
function visits(piece, layer, expert) {
  for (let j = 0; j < piece.k; j++) if (piece.route[layer * piece.k + j] === expert) return true;
  return false;
}
