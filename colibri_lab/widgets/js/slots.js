// The KV slot pool: hue is the owning expert, brightness how full the slot is.
class SlotsPanel {
  constructor(board) {
    this.board = board;
    Object.assign(this, card("slots", "KV slots"));
    this.surface = new Surface(board, this, 150, {pick: (x, y) => this.pick(x, y), walk: (dx, dy) => this.walk(dx, dy)});
  }
  layout(f) {
    // a large pool that is hardly used: draw as many slots as will fill for a while
    const pool = Math.max(f.kv[1], f.a.owner.length, 1), want = Math.max(256, 2 ** Math.ceil(Math.log2(1.3 * f.a.owner.length + 1)));
    const n = pool <= 512 ? pool : Math.min(pool, want), width = this.surface.canvas.clientWidth || 400;
    const even = (n & (n - 1)) === 0, ideal = Math.max(16, Math.sqrt(n * width / 165));  // full rows where the pool allows
    const across = even ? 2 ** Math.round(Math.log2(ideal)) : Math.ceil(ideal), cell = width / across;
    this.grid = {n, across, cell};
    this.surface.setHeight(Math.max(24, Math.ceil(Math.ceil(n / across) * cell)));
  }
  slot(f, i) {
    if (i >= f.a.owner.length || !f.a.owner[i]) return null;
    const fill = (f.a.fill[i >> 1] >> (i & 1) * 4 & 15) / 15, free = f.a.owner[i] >= f.freed, id = f.a.owner[i] - (free ? f.freed : 0);
    return id === 1 ? {shared: true, free, fill} : {layer: (id - 2) / f.E | 0, expert: (id - 2) % f.E, free, fill};
  }
  pick(x, y) {
    const f = this.board.frame;
    if (!f || !this.grid) return null;
    const i = Math.floor(y / this.grid.cell) * this.grid.across + Math.floor(x / this.grid.cell);
    return i >= 0 && i < this.grid.n ? {kind: "slot", slot: i} : null;
  }
  walk(dx, dy) {
    const at = this.board.focus, n = this.grid ? this.grid.n : 1;
    if (!at || at.kind !== "slot") return {kind: "slot", slot: 0};
    return {kind: "slot", slot: Math.max(0, Math.min(n - 1, at.slot + dx + dy * this.grid.across))};
  }
  describe(f, i) {
    const slot = this.slot(f, i);
    if (!slot) return `slot ${i}: free`;
    return `slot ${i}: ${slot.free ? "free, last " : ""}` + (slot.shared ? "shared base slot" : `layer ${slot.layer}, expert ${slot.expert}`) + `, ${Math.round(slot.fill * 100)} % full`;
  }
  draw(f) {
    this.layout(f);
    const {n, across, cell} = this.grid, theme = this.board.theme, owners = new Map();
    const [used, pool, peak] = f.kv;
    const g = this.surface.begin(`KV slots: ${used} of ${pool} in use, at most ${peak} so far`), gap = cell > 5 ? 1 : 0.5;
    const at = this.board.focus, ringed = [];
    let before = 0;
    for (let i = 0; i < n; i++) {
      const x = i % across * cell, y = Math.floor(i / across) * cell, slot = this.slot(f, i), side = cell - gap;
      g.fillStyle = theme.empty; g.globalAlpha = 1;
      g.fillRect(x, y, side, side);
      if (!slot) continue;
      const who = slot.shared ? -1 : slot.expert;
      if (slot.free) before++;
      else owners.set(who, (owners.get(who) || 0) + 1);
      g.fillStyle = who < 0 ? theme.mute : OKABE[who % 8]; g.globalAlpha = slot.free ? 0.22 : 0.45 + 0.55 * slot.fill;
      g.fillRect(x, y, side, side);
      if (at && at.kind === "expert" && slot.layer === at.layer && slot.expert === at.expert) ringed.push(i);
    }
    g.globalAlpha = 1; g.strokeStyle = theme.fg; g.lineWidth = 1.5;
    if (at && at.kind === "slot") ringed.push(at.slot);
    for (const i of ringed) g.strokeRect(i % across * cell - 0.5, Math.floor(i / across) * cell - 0.5, cell, cell);
    const name = (who) => (who < 0 ? "shared base" : `expert ${who}`);
    const top = [...owners].sort((a, b) => b[1] - a[1] || a[0] - b[0]).slice(0, 4);
    const rest = used - top.reduce((sum, t) => sum + t[1], 0);
    setLegend(this.legend, [...top.map(([who, count]) => [`${name(who)}: ${count}`, who < 0 ? theme.mute : OKABE[who % 8]]),
      ...(rest > 0 ? [[`${owners.size - top.length} others: ${rest}`, theme.mute]] : []), [`free ${whole(pool - used)}${before ? `, ${whole(before)} used before` : ""}`, theme.empty]]);
    put(this.sub, `${n < pool ? `first ${whole(n)} of ${whole(pool)} · ` : ""}hue: owner · fill${peak ? ` · peak ${whole(peak)}` : ""}`);
    put(this.readout, at && at.kind === "slot" ? this.describe(f, at.slot) : at && at.kind === "expert" && ringed.length ? many(ringed.length, "slot") + " of this expert" : "");
  }
}
