// Layers x experts: brightness is the share of the last tokens, a ring says in memory, an orange one read just now;
// at the right how many faults each layer had. A row's label is the layer itself.
class ExpertsPanel {
  constructor(board) {
    this.board = board; this.sorted = false; this.order = []; this.place = []; this.at = 0;
    Object.assign(this, card("experts", "Experts"));
    this.sort = h("button", {type: "button", class: "cl-tool cl-wide", "aria-pressed": "false", title: "each layer's busiest expert first (s)"}, "sort by load");
    this.sort.addEventListener("click", () => this.turn());
    this.tools.append(this.sort);
    this.tabled = new TableView(board, this, "Experts");
    this.surface = new Surface(board, this, 200, {pick: (x, y) => this.pick(x, y), walk: (dx, dy) => this.walk(dx, dy), keys: {s: () => this.turn()}});
  }
  turn() {
    this.sorted = !this.sorted; this.at = 0;
    this.sort.setAttribute("aria-pressed", this.sorted);
    this.board.redraw();
  }
  // which expert stands where: order[layer * E + column] and its inverse; sorted anew once a second, to be read
  arrange(f) {
    const n = f.L * f.E;
    if (this.order.length === n && (!this.sorted ? this.at < 0 : performance.now() - this.at < 1000)) return;
    this.at = this.sorted ? performance.now() : -1;
    this.order = new Uint16Array(n); this.place = new Uint16Array(n);
    for (let l = 0; l < f.L; l++) {
      const row = Array.from({length: f.E}, (_, e) => e), load = (e) => f.a.cell[l * f.E + e] & 63;
      if (this.sorted) row.sort((a, b) => load(b) - load(a) || a - b);
      row.forEach((e, i) => { this.order[l * f.E + i] = e; this.place[l * f.E + e] = i; });
    }
  }
  layout(f) {
    const {L, E} = f, left = 52, right = 62, width = this.surface.canvas.clientWidth;
    const high = Math.max(4, Math.min(26, Math.max(7, Math.floor(L > 10 ? 300 / L : 212 / L))));
    this.grid = {left, right, top: 5, w: (width - left - right) / E, h: high, end: width - right};
    this.surface.setHeight(L * high + 23);
  }
  pick(x, y) {
    const f = this.board.frame;
    if (!f || !this.grid) return null;
    const layer = Math.floor((y - this.grid.top) / this.grid.h), column = Math.floor((x - this.grid.left) / this.grid.w);
    if (layer < 0 || layer >= f.L) return null;
    return column >= 0 && column < f.E ? {kind: "expert", layer, expert: this.order[layer * f.E + column]} : {kind: "layer", layer};
  }
  // one to the left of the first column is the layer
  walk(dx, dy) {
    const f = this.board.frame, at = this.board.focus;
    if (!f) return null;
    if (!at || (at.kind !== "expert" && at.kind !== "layer")) return {kind: "expert", layer: 0, expert: this.order[0]};
    const layer = (at.layer + dy + f.L) % f.L, now = at.kind === "expert" ? this.place[at.layer * f.E + at.expert] : -1;
    const column = (now + 1 + dx + f.E + 1) % (f.E + 1) - 1;
    return column < 0 ? {kind: "layer", layer} : {kind: "expert", layer, expert: this.order[layer * f.E + column]};
  }
  share(f, i) { return (f.a.cell[i] & 63) / 63 * f.peak; }
  describe(f, layer, expert) {
    const i = layer * f.E + expert, cell = f.a.cell[i], told = this.board.told("expert", {layer, expert});
    return `layer ${layer}, expert ${expert}: ${percent(told ? told.share : this.share(f, i))} of the last ${f.window} tokens, ` +
      (cell & 128 ? "read from disk just now" : cell & 64 ? "in memory" : "on disk") +
      (marked(f, 2, i) ? ", on the GPU" : "") + (marked(f, 0, i) ? ", pinned" : "") + (marked(f, 1, i) ? ", read ahead" : "") + (told ? `, ${many(told.faults, "fault")}` : "");
  }
  // of a layer: [in memory, its busiest experts, faults]
  layer(f, layer, most = 1) {
    const all = Array.from({length: f.E}, (_, e) => e), base = layer * f.E;
    const busy = all.sort((a, b) => (f.a.cell[base + b] & 63) - (f.a.cell[base + a] & 63) || a - b).slice(0, most);
    return [all.reduce((sum, e) => sum + (f.a.cell[base + e] >> 6 & 1), 0), busy, f.a.fault[layer]];
  }
  describeLayer(f, layer) {
    const [memory, [busy], faults] = this.layer(f, layer), all = f.a.fault.reduce((a, b) => a + b, 0);
    return `layer ${layer}: ${memory} of ${f.E} in memory, busiest expert ${busy} (${percent(this.share(f, layer * f.E + busy))}), ` +
      `${many(faults, "fault")}` + (all ? `, ${percent(faults / all)} of all` : "");
  }
  draw(f) {
    this.layout(f); this.arrange(f);
    const {L, E} = f, cell = f.a.cell, {left, top, w, h: high} = this.grid, theme = this.board.theme;
    let hot = 0, memory = 0, fresh = 0, pinned = 0, ahead = 0, device = 0;
    for (let i = 0; i < cell.length; i++) {
      if ((cell[i] & 63) > (cell[hot] & 63)) hot = i;
      memory += cell[i] >> 6 & 1; fresh += cell[i] >> 7;
      pinned += marked(f, 0, i); ahead += marked(f, 1, i); device += marked(f, 2, i);
    }
    const g = this.surface.begin(`Experts: ${L} layers of ${E}. ${memory} of ${L * E} in memory. Busiest: ` + this.describe(f, hot / E | 0, hot % E));
    const gap = w > 14 && high > 12 ? 2 : w > 5 && high > 5 ? 1 : 0, ring = w > 9 && high > 8;
    const edge = gap === 2 ? 2 : 1;
    for (let l = 0; l < L; l++) for (let column = 0; column < E; column++) {
      const i = l * E + this.order[l * E + column], v = cell[i], y = top + l * high, ch = high - gap;
      // without gaps boxes end where the next begins, or they would shine through each other
      const x = gap ? left + column * w : Math.round(left + column * w), cw = gap ? w - gap : Math.round(left + (column + 1) * w) - x;
      g.fillStyle = CIVIDIS[v & 63];
      g.fillRect(x, y, cw, ch);
      const corner = Math.min(5, cw / 3, ch / 3);
      if (marked(f, 0, i)) { g.fillStyle = theme.fg; g.fillRect(x + cw - corner, y, corner, corner); }
      if (marked(f, 1, i)) { g.fillStyle = HIT; g.fillRect(x, y, corner, corner); }
      if (marked(f, 2, i)) { g.fillStyle = DEVICE; g.fillRect(x, y + ch - corner, corner, corner); }
      if (!(v & 192)) continue;
      if (ring) {
        g.lineWidth = edge; g.strokeStyle = v & 128 ? FAULT : MEMORY;
        g.strokeRect(x + edge / 2, y + edge / 2, cw - edge, ch - edge);
      } else if (w > 2) {
        g.fillStyle = v & 128 ? FAULT : MEMORY;
        g.fillRect(x, y + ch - 1, cw, 1);
      }
    }
    this.axes(g, f);
    this.faults(g, f);
    const seen = this.marks(g, f);
    put(this.sub, `share of the last ${many(f.window, "token")}, brightest ${percent(f.peak)}`);
    setLegend(this.legend, [["busy", CIVIDIS[63]], ["idle", CIVIDIS[4]], [`in memory ${memory}`, MEMORY, "ring"],
      [`on disk ${L * E - memory}`, theme.line, "ring"], [`read just now ${fresh}`, FAULT, "ring"],
      ...(pinned ? [[`pinned ${pinned} (right corner)`, theme.fg]] : []), ...(ahead ? [[`read ahead ${ahead} (left corner)`, HIT]] : []),
      ...(device ? [[`on the GPU ${device} (lower corner)`, DEVICE]] : [])]);
    put(this.readout, seen);
  }
  axes(g, f) {
    const {left, top, w, h: high} = this.grid, theme = this.board.theme;
    g.fillStyle = theme.mute;
    const every = Math.ceil(13 / high), across = [1, 2, 4, 8, 16, 32, 64].find((n) => n * w > 20) || 64;
    for (let l = 0; l < f.L; l += every) g.fillText(`layer ${l}`, 0, top + l * high + high / 2 - 1);
    if (this.sorted) return g.fillText("busiest first", left, top + f.L * high + 9);
    g.textAlign = "center";
    for (let e = 0; e < f.E; e += across) g.fillText(e, left + e * w + w / 2 - 1, top + f.L * high + 9);
    g.textAlign = "left";
  }
  // faults of each layer over the run, as bars with the most of them as a number
  faults(g, f) {
    const {end, top, h: high} = this.grid, fault = f.a.fault, most = Math.max(1, ...fault), x = end + 8, room = this.grid.right - 10;
    for (let l = 0; l < f.L; l++) { g.fillStyle = rgba(FAULT, 0.75); g.fillRect(x, top + l * high + high * 0.2, fault[l] / most * room, Math.max(1, high * 0.5)); }
    g.fillStyle = this.board.theme.mute;
    g.textAlign = "right"; g.fillText("faults", end + this.grid.right, top + f.L * high + 9); g.textAlign = "left";
    if (high < 12) return;
    g.fillStyle = this.board.theme.fg;
    for (let l = 0; l < f.L; l++) if (fault[l]) g.fillText(compact(fault[l]), x + 3, top + l * high + high * 0.45);
  }
  // the pointed-at expert or layer, or every expert of the pointed-at token or slot; returns what it is in words
  marks(g, f) {
    const at = this.board.focus, {left, top, w, h: high} = this.grid;
    if (!at) return "";
    g.strokeStyle = this.board.theme.fg; g.lineWidth = 2;
    const mark = (l, e) => g.strokeRect(left + this.place[l * f.E + e] * w - 1, top + l * high - 1, w, high);
    if (at.kind === "layer" && at.layer < f.L) { g.strokeRect(left - 1, top + at.layer * high - 1, f.E * w, high); return this.describeLayer(f, at.layer); }
    if (at.kind === "expert") { mark(at.layer, at.expert); return this.describe(f, at.layer, at.expert); }
    const owner = ownerOf(f, at);
    if (owner) { mark(owner.layer, owner.who); return this.describe(f, owner.layer, owner.who); }
    const piece = focusedPiece(this.board.story, f, at);
    if (!piece) return "";
    let known = 0, memory = 0;
    for (let j = 0; j < piece.route.length; j++) if (piece.route[j] !== piece.none) {
      const layer = j / piece.k | 0;
      mark(layer, piece.route[j]); known++; memory += f.a.cell[layer * f.E + piece.route[j]] >> 6 & 1;
    }
    return known ? `${many(known, "expert")} of this token, ${memory} in memory now` : "";
  }
  table(f) {
    const rows = Array.from({length: f.L}, (_, l) => {
      const [memory, busy, faults] = this.layer(f, l, 3), of = (which) => Array.from({length: f.E}, (_, e) => marked(f, which, l * f.E + e)).reduce((a, b) => a + b, 0);
      return [`layer ${l}`, busy.map((e) => `${e}: ${percent(this.share(f, l * f.E + e))}`).join(", "), memory, f.E - memory, of(2), of(0), of(1), whole(faults)];
    });
    return {caption: `Experts by layer: share of the last ${many(f.window, "token")}; faults of the run`,
      head: ["", "busiest experts", "in memory", "on disk", "on the GPU", "pinned", "read ahead", "faults"], rows};
  }
}
