// Pages: every expert's pages, in memory or not, faults as flashes that fade; and what each token asked of the disk.
class PagesPart {
  constructor(board) {
    this.board = board; this.glow = new Float32Array(0); this.before = null;
    const words = () => h("div", {class: "cl-words", role: "status"});
    [this.mapWords, this.stripWords] = [words(), words()];
    this.mapLegend = h("div", {class: "cl-legend cl-foot"}); this.stripLegend = h("div", {class: "cl-legend cl-foot"});
    const [left, right] = [h("div"), h("div")];
    this.map = new Surface(board, {body: left}, 120, {pick: (x, y) => this.pick(x, y), walk: (dx, dy) => this.walk(dx, dy)});
    this.strip = new Surface(board, {body: right}, 120, {pick: (x) => this.token(x), walk: (dx) => this.step(dx)});
    left.append(this.mapLegend, this.mapWords); right.append(this.stripLegend, this.stripWords);
    this.node = h("div", {class: "cl-pages"}, left, right);
  }
  // -- the map: [left, width and height of an expert's box, columns and rows of its pages]
  layout(f) {
    const width = this.map.canvas.clientWidth, left = 26, w = (width - left) / f.E, high = Math.max(3, Math.min(16, Math.floor(200 / f.L)));
    const pages = f.pages || 1, gap = w > 6 && high > 5 ? 1.5 : w > 3 ? 0.5 : 0, across = Math.min(pages, Math.max(1, Math.floor((w - gap) / 2.5)));
    const down = Math.ceil(pages / across), each = (high - gap) / down >= 2;
    this.grid = {left, w, high, gap, across: each ? across : 1, down: each ? down : 1, pages: each ? pages : 1};
    this.map.setHeight(f.L * high + 2);
  }
  pick(x, y) {
    const f = this.board.frame, grid = this.grid;
    if (!f || !grid) return null;
    const layer = Math.floor(y / grid.high), expert = Math.floor((x - grid.left) / grid.w);
    if (layer < 0 || layer >= f.L || expert >= f.E) return null;
    return expert < 0 ? {kind: "layer", layer} : {kind: "expert", layer, expert};
  }
  walk(dx, dy) {
    const f = this.board.frame, at = this.board.focus;
    if (!f) return null;
    if (!at || at.kind !== "expert") return {kind: "expert", layer: 0, expert: 0};
    return {kind: "expert", layer: (at.layer + dy + f.L) % f.L, expert: (at.expert + dx + f.E) % f.E};
  }
  // what came in since the last picture glows, and fades by a third with each picture; a picture that stands still
  // says the same to everybody, whatever was seen before
  flash(f) {
    const cell = f.a.cell, n = cell.length, held = f.past && f.past.at >= 0;  // a moment of the past, while the engine goes on
    const moves = f.state === "replay" || (f.state === "generating" && !held);
    if (this.glow.length !== n) { this.glow = new Float32Array(n); this.before = null; }
    if (moves && this.before === cell) return;
    for (let i = 0; i < n; i++) {
      if (!moves) { this.glow[i] = cell[i] >> 7; continue; }
      const came = cell[i] >> 7 || (this.before && cell[i] >> 6 & 1 && !(this.before[i] >> 6 & 1));
      this.glow[i] = came ? 1 : this.glow[i] < 0.1 ? 0 : this.glow[i] * 0.67;
    }
    this.before = cell;
  }
  describe(f, layer, expert) {
    const i = layer * f.E + expert, v = f.a.cell[i], pages = f.pages || 1, inside = v >> 6 & 1, told = this.board.told("expert", {layer, expert});
    return `layer ${layer}, expert ${expert}: ${inside ? pages : 0} of ${many(pages, "page")} in memory` + (inside && told && told.frames ? `, ${this.frames(told.frames)}` : "") +
      (marked(f, 2, i) ? ", on the GPU" : "") + (marked(f, 0, i) ? ", pinned" : "") + (v & 128 ? ", read just now" : "") +
      (told ? `, ${many(told.faults, "fault")}` + (told.since === null ? "" : `, the last ${told.since} s before the newest token`) : "");
  }
  // an expert's pages lie in one run of frames
  frames(all) {
    const there = all.filter((v) => v >= 0), [low, high] = [Math.min(...there), Math.max(...there)];
    return !there.length ? "on their way" : there.length === 1 ? `frame ${low}` : `frames ${low} to ${high}`;
  }
  // -- the strip
  get left() { return 30; }
  at(i) { const n = this.board.frame.a.flag.length; return this.left + (120 - n + i) * (this.strip.width - this.left) / 120; }
  token(x) {
    const f = this.board.frame;
    if (!f || !f.a.flag.length) return null;
    const i = Math.floor((x - this.at(0)) / ((this.strip.width - this.left) / 120));
    return i >= 0 && i < f.a.flag.length ? tokenFocus(f, i) : null;
  }
  step(dx) {
    const f = this.board.frame, n = f ? f.a.flag.length : 0, now = n ? stripColumn(f, this.board.focus) : -1;
    return n ? tokenFocus(f, Math.max(0, Math.min(n - 1, now < 0 ? n - 1 : now + dx))) : null;
  }
  // faults, hits, evictions, hits of guesses, guesses thrown away
  counts(f, i) { const wide = f.a.count.shape[1]; return f.a.count.subarray(i * wide, (i + 1) * wide); }
  say(f, i) {
    const [faults, , gone, ahead, waste] = this.counts(f, i);
    return `${f.a.flag[i] & 1 ? "prompt step" : `token ${f.a.place[i] + 1}`}: ${many(faults, "demand fault")}, ${many(ahead, "prefetch hit")}, ${waste} wasted, ${gone} evicted`;
  }
  draw(f) {
    this.layout(f); this.flash(f);
    this.drawMap(f); this.drawStrip(f);
  }
  drawMap(f) {
    const {left, w, high, gap, across, down, pages} = this.grid, theme = this.board.theme, memory = f.a.cell.reduce((sum, v) => sum + (v >> 6 & 1), 0);
    const device = f.a.cell.reduce((sum, _, i) => sum + marked(f, 2, i), 0);
    const total = f.L * f.E * (f.pages || 1), inside = memory * (f.pages || 1), at = this.board.focus;
    const g = this.map.begin(`Pages: ${whole(inside)} of ${whole(total)} in memory, ${many(f.pages || 1, "page")} an expert`);
    const pw = (w - gap) / across, ph = (high - gap) / down, line = pages > 1 ? 0.5 : 0;
    for (let l = 0; l < f.L; l++) for (let e = 0; e < f.E; e++) {
      const i = l * f.E + e, there = f.a.cell[i] >> 6 & 1, x = left + e * w, y = l * high;
      for (let p = 0; p < pages; p++) {
        const px = x + p % across * pw, py = y + (p / across | 0) * ph;
        g.fillStyle = there ? (marked(f, 0, i) ? OKABE[0] : MEMORY) : theme.empty;
        g.fillRect(px, py, pw - line, ph - line);
        if (marked(f, 2, i)) { g.fillStyle = DEVICE; g.fillRect(px, py + (ph - line) * 0.6, pw - line, (ph - line) * 0.4); }
        if (this.glow[i]) { g.globalAlpha = this.glow[i]; g.fillStyle = FAULT; g.fillRect(px, py, pw - line, ph - line); g.globalAlpha = 1; }
      }
    }
    g.fillStyle = theme.mute;
    const every = Math.ceil(13 / high);
    for (let l = 0; l < f.L; l += every) g.fillText(l, 4, Math.max(6, l * high + high / 2));
    g.strokeStyle = theme.fg; g.lineWidth = 1.5;
    const ring = (l, e) => g.strokeRect(left + e * w - 1, l * high - 1, w, high);
    const piece = focusedPiece(this.board.story, f, at), owner = ownerOf(f, at);
    if (at && at.kind === "expert") ring(at.layer, at.expert);
    if (at && at.kind === "layer") g.strokeRect(left - 1, at.layer * high - 1, f.E * w, high);
    if (owner) ring(owner.layer, owner.who);
    if (piece) piece.route.forEach((e, j) => { if (e !== piece.none) ring(j / piece.k | 0, e); });
    setLegend(this.mapLegend, [[`in memory ${whole(inside)}`, MEMORY], ["pinned", OKABE[0]], [`on disk ${whole(total - inside)}`, theme.empty], ["just read", FAULT],
      ...(device ? [[`on the GPU ${whole(device * (f.pages || 1))} (below)`, DEVICE]] : []), [`${many(f.pages || 1, "page")} an expert`, "transparent", "none"]]);
    put(this.mapWords, at && at.kind === "expert" ? this.describe(f, at.layer, at.expert) : owner ? this.describe(f, owner.layer, owner.who) : at && at.kind === "layer" ? this.layerWords(f, at.layer) : "");
  }
  layerWords(f, layer) {
    let inside = 0;
    for (let e = 0; e < f.E; e++) inside += f.a.cell[layer * f.E + e] >> 6 & 1;
    return `layer ${layer}: ${whole(inside * (f.pages || 1))} of ${whole(f.E * (f.pages || 1))} pages in memory, ${many(f.a.fault[layer], "fault")}`;
  }
  drawStrip(f) {
    const n = f.a.flag.length, theme = this.board.theme, sums = [0, 0, 0, 0, 0];
    let up = 1, low = 1;
    for (let i = 0; i < n; i++) {
      const c = this.counts(f, i);
      c.forEach((v, k) => { sums[k] += v; });
      if (!(f.a.flag[i] & 1)) { up = Math.max(up, c[0] + c[3]); low = Math.max(low, c[2] + c[4]); }
    }
    const [faults, , gone, ahead, waste] = sums;
    this.strip.setHeight(Math.max(90, this.map.height));
    const g = this.strip.begin(`Of the last ${many(n, "token")}: ${whole(faults)} demand faults, ${whole(ahead)} prefetch hits, ${whole(waste)} guesses wasted, ${whole(gone)} evicted`);
    const tall = this.strip.height - 4, zero = 2 + tall * up / (up + low), unit = tall / (up + low), w = (this.strip.width - this.left) / 120, bar = w > 3 ? w - 1 : w;
    const box = (x, from, to, colour) => { g.fillStyle = colour; g.fillRect(x, Math.min(from, to), bar, Math.abs(to - from)); };
    for (let i = 0; i < n; i++) {
      const c = this.counts(f, i), x = this.at(i), top = Math.max(2, zero - c[0] * unit), bottom = Math.min(tall + 2, zero + c[2] * unit);
      box(x, zero, top, FAULT); box(x, top, Math.max(2, top - c[3] * unit), OKABE[4]);
      box(x, zero, bottom, EVICTED); box(x, bottom, Math.min(tall + 2, bottom + c[4] * unit), theme.mute);
    }
    g.fillStyle = theme.line; g.fillRect(this.left, zero, this.strip.width - this.left, 1);
    g.fillStyle = theme.mute; g.textAlign = "right";
    g.fillText(up, this.left - 5, 8); g.fillText(0, this.left - 5, zero); if (low * unit > 16) g.fillText(low, this.left - 5, tall - 4);
    g.textAlign = "left";
    const here = stripColumn(f, this.board.focus);
    if (here >= 0) { g.strokeStyle = theme.fg; g.lineWidth = 1.5; g.strokeRect(this.at(here) - 1, 1, bar + 2, tall); }
    setLegend(this.stripLegend, [[`demand faults ${whole(faults)}`, FAULT], [`prefetch hits ${whole(ahead)}`, OKABE[4]], [`evicted ${whole(gone)} (below)`, EVICTED], [`wasted ${whole(waste)} (below)`, theme.mute]]);
    put(this.stripWords, here >= 0 ? this.say(f, here) : "");
  }
}
