// Layers x experts: brightness is the share of the last tokens, a ring says in memory, an orange one read just now.
class ExpertsPanel {
  constructor(board) {
    this.board = board;
    Object.assign(this, card("experts", "Experts"));
    this.surface = new Surface(board, this, 200, {pick: (x, y) => this.pick(x, y), walk: (dx, dy) => this.walk(dx, dy)});
  }
  layout(frame) {
    const {L, E} = frame, left = 52, width = this.surface.canvas.clientWidth;
    const high = Math.max(4, Math.min(26, Math.max(7, Math.floor(L > 10 ? 300 / L : 212 / L))));
    this.grid = {left, top: 5, w: (width - left) / E, h: high};
    this.surface.setHeight(L * high + 23);
  }
  pick(x, y) {
    const f = this.board.frame;
    if (!f || !this.grid || x < this.grid.left) return null;
    const layer = Math.floor((y - this.grid.top) / this.grid.h), expert = Math.floor((x - this.grid.left) / this.grid.w);
    return layer < f.L && expert < f.E && layer >= 0 ? {kind: "expert", layer, expert} : null;
  }
  walk(dx, dy) {
    const f = this.board.frame, at = this.board.focus;
    if (!f) return null;
    if (!at || at.kind !== "expert") return {kind: "expert", layer: 0, expert: 0};
    return {kind: "expert", layer: (at.layer + dy + f.L) % f.L, expert: (at.expert + dx + f.E) % f.E};
  }
  describe(f, layer, expert) {
    const i = layer * f.E + expert, cell = f.a.cell[i], mark = f.a.mark[i], share = (cell & 63) / 63 * f.peak;
    return `layer ${layer}, expert ${expert}: ${percent(share)} of the last ${f.window} tokens, ` +
      (cell & 128 ? "read from disk just now" : cell & 64 ? "in memory" : "on disk") +
      (mark & 1 ? ", pinned" : "") + (mark & 2 ? ", read ahead" : "");
  }
  draw(f) {
    this.layout(f);
    const {L, E} = f, cell = f.a.cell, {left, top, w, h: high} = this.grid, theme = this.board.theme;
    let hot = 0, memory = 0, fresh = 0, pinned = 0, ahead = 0;
    for (let i = 0; i < cell.length; i++) {
      if ((cell[i] & 63) > (cell[hot] & 63)) hot = i;
      memory += cell[i] >> 6 & 1; fresh += cell[i] >> 7;
      pinned += f.a.mark[i] & 1; ahead += f.a.mark[i] >> 1 & 1;
    }
    const g = this.surface.begin(`Experts: ${L} layers of ${E}. ${memory} of ${L * E} in memory. Busiest: ` + this.describe(f, hot / E | 0, hot % E));
    const gap = w > 14 && high > 12 ? 2 : w > 5 && high > 5 ? 1 : 0, ring = w > 9 && high > 8;
    const edge = gap === 2 ? 2 : 1;
    for (let l = 0; l < L; l++) for (let e = 0; e < E; e++) {
      const v = cell[l * E + e], x = left + e * w, y = top + l * high, cw = w - gap, ch = high - gap;
      g.fillStyle = CIVIDIS[v & 63];
      g.fillRect(x, y, gap ? cw : w + 0.3, gap ? ch : high + 0.3);
      const mark = f.a.mark[l * E + e], corner = Math.min(5, cw / 3, ch / 3);
      if (mark & 1) { g.fillStyle = theme.fg; g.fillRect(x + cw - corner, y, corner, corner); }
      if (mark & 2) { g.fillStyle = HIT; g.fillRect(x, y, corner, corner); }
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
    this.marks(g, f);
    put(this.sub, `share of the last ${many(f.window, "token")}, brightest ${percent(f.peak)}`);
    setLegend(this.legend, [["busy", CIVIDIS[63]], ["idle", CIVIDIS[4]], [`in memory ${memory}`, MEMORY, "ring"],
      [`on disk ${L * E - memory}`, theme.line, "ring"], [`read just now ${fresh}`, FAULT, "ring"],
      ...(pinned ? [[`pinned ${pinned} (right corner)`, theme.fg]] : []), ...(ahead ? [[`read ahead ${ahead} (left corner)`, HIT]] : [])]);
    const at = this.board.focus;
    put(this.readout, at && at.kind === "expert" ? this.describe(f, at.layer, at.expert) : "");
  }
  axes(g, f) {
    const {left, top, w, h: high} = this.grid, theme = this.board.theme;
    g.fillStyle = theme.mute;
    const every = Math.ceil(13 / high), across = [1, 2, 4, 8, 16, 32, 64].find((n) => n * w > 20) || 64;
    for (let l = 0; l < f.L; l += every) g.fillText(`layer ${l}`, 0, top + l * high + high / 2 - 1);
    g.textAlign = "center";
    for (let e = 0; e < f.E; e += across) g.fillText(e, left + e * w + w / 2 - 1, top + f.L * high + 9);
    g.textAlign = "left";
  }
  // the pointed-at expert, or every expert of the pointed-at token
  marks(g, f) {
    const at = this.board.focus, {left, top, w, h: high} = this.grid;
    if (!at) return;
    g.strokeStyle = this.board.theme.fg; g.lineWidth = 2;
    const mark = (l, e) => g.strokeRect(left + e * w - 1, top + l * high - 1, w, high);
    if (at.kind === "expert") mark(at.layer, at.expert);
    const piece = at.kind === "token" && this.board.story.find(at.at);
    if (piece) for (let i = 0; i < piece.route.length; i++) if (piece.route[i] !== piece.none) mark(i / piece.k | 0, piece.route[i]);
  }
}
