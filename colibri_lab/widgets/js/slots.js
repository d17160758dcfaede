// The KV slot pool: hue is the owning expert or the sequence, brightness how full a slot is, a bar or a dot its kind.
const KINDS = ["own", "double", "base", "free"];

// what a slot is, null where it was never used; who: expert or the sequence's place in f.owners
function slotOf(f, i) {
  const v = i < f.a.slot.length ? f.a.slot[i] : 24, kind = KINDS[v >> 3 & 3], many = f.owners.length || f.E, id = v >>> 5;
  if (kind === "free") return v & 1 ? {kind} : null;
  return {kind, fill: (v & 7) / 7, layer: id / many | 0, who: id % many, shared: kind === "base" && !f.owners.length};
}

class SlotsPanel {
  constructor(board) {
    this.board = board;
    Object.assign(this, card("slots", "KV slots"));
    this.hue = h("select", {"aria-label": "what colours the slots"}, h("option", {value: "expert"}, "expert"), h("option", {value: "sequence"}, "sequence"));
    this.hue.addEventListener("change", () => board.send({do: "set", name: "hue", value: this.hue.value}));
    this.sub.append("hue: ", this.hue);
    this.tabled = new TableView(board, this, "KV slots");
    this.surface = new Surface(board, this, 150, {pick: (x, y) => this.pick(x, y), walk: (dx, dy) => this.walk(dx, dy)});
  }
  layout(f) {
    // a large pool that is hardly used: draw as many slots as will fill for a while
    const last = f.a.slot.length, pool = Math.max(f.kv[1], last, 1), want = Math.max(256, 2 ** Math.ceil(Math.log2(1.3 * last + 1)));
    const n = pool <= 512 ? pool : Math.min(pool, want), width = this.surface.canvas.clientWidth || 400;
    const even = (n & (n - 1)) === 0, ideal = Math.max(16, Math.sqrt(n * width / 165));  // full rows where the pool allows
    const across = even ? 2 ** Math.round(Math.log2(ideal)) : Math.ceil(ideal), cell = width / across;
    this.grid = {n, across, cell};
    this.surface.setHeight(Math.max(24, Math.ceil(Math.ceil(n / across) * cell)));
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
  name(f, slot) { return f.owners.length ? `sequence ${f.owners[slot.who]}` : slot.shared ? "shared base slot" : `expert ${slot.who}`; }
  describe(f, i) {
    const slot = slotOf(f, i);
    if (!slot || slot.kind === "free") return `slot ${i}: free` + (slot ? ", used before" : "");
    const kind = slot.kind === "double" ? ", one of two at once" : slot.kind === "base" && f.owners.length ? ", shared base" : "";
    const told = this.board.told("slot", {slot: i});
    if (told && !told.free) return `slot ${i}: layer ${told.layer}, sequence ${told.sequence}, ${told.owner === null ? "shared base" : `expert ${told.owner}`}${slot.kind === "double" ? kind : ""}, ${told.tokens}${told.size ? ` of ${told.size}` : ""} tokens`;
    return `slot ${i}: layer ${slot.layer}, ${this.name(f, slot)}${kind}, ${Math.round(slot.fill * 100)} % full`;
  }
  // which slots belong to what is pointed at: a layer's, an expert's, those of the experts that a token was first for
  wanted(f, at) {
    if (!at) return null;
    if (at.kind === "layer") return (slot) => slot.layer === at.layer;
    if (f.owners.length) return null;
    if (at.kind === "expert") return (slot) => !slot.shared && slot.layer === at.layer && slot.who === at.expert;
    const piece = focusedPiece(this.board.story, f, at);
    return piece ? (slot) => !slot.shared && piece.route[slot.layer * piece.k] === slot.who : null;
  }
  table(f) {
    const owners = new Map();
    for (let i = 0; i < f.a.slot.length; i++) {
      const slot = slotOf(f, i);
      if (!slot || slot.kind === "free") continue;
      const name = this.name(f, slot), of = owners.get(name) || [0, 0, 0, 0, 0];
      of[0]++; of[1 + KINDS.indexOf(slot.kind)]++; of[4] += slot.fill;
      owners.set(name, of);
    }
    const rows = [...owners].sort((a, b) => b[1][0] - a[1][0]).map(([name, [n, own, double, base, fill]]) => [name, whole(n), whole(own), whole(double), whole(base), percent(fill / n)]);
    const [used, pool, peak, size] = f.kv;
    return {caption: `KV slots${size ? ` of ${size} tokens` : ""}: ${whole(used)} of ${whole(pool)} in use, ${whole(pool - used)} free, at most ${whole(peak)} so far`,
      head: ["owner", "slots", "own", "of two at once", "shared base", "full"], rows: rows.length ? rows.slice(0, 300) : [["nobody", "0", "0", "0", "0", "0 %"]]};
  }
  draw(f) {
    this.layout(f);
    const {n, across, cell} = this.grid, theme = this.board.theme, owners = new Map(), kinds = {own: 0, double: 0, base: 0, free: 0};
    const [used, pool, peak, size, spilled] = f.kv;
    for (let i = 0; i < f.a.slot.length; i++) { const slot = slotOf(f, i); if (slot) kinds[slot.kind]++; }
    const g = this.surface.begin(`KV slots${size ? ` of ${size} tokens` : ""}: ${used} of ${pool} in use, at most ${peak} so far; ${kinds.own} own, ${kinds.double} double, ${kinds.base} shared base` + (spilled ? `, ${spilled} spilled to a file` : ""));
    const at = this.board.focus, ringed = [], wanted = this.wanted(f, at), gap = cell > 5 ? 1 : 0.5;
    for (let i = 0; i < n; i++) {
      const x = i % across * cell, y = Math.floor(i / across) * cell, slot = slotOf(f, i), side = cell - gap;
      g.fillStyle = theme.empty; g.globalAlpha = 1;
      g.fillRect(x, y, side, side);
      if (!slot) continue;
      if (slot.kind === "free") { g.fillStyle = theme.mute; g.globalAlpha = 0.22; g.fillRect(x, y, side, side); continue; }
      const who = slot.shared ? -1 : slot.who;
      owners.set(who, (owners.get(who) || 0) + 1);
      g.fillStyle = who < 0 ? theme.mute : OKABE[who % 8]; g.globalAlpha = 0.45 + 0.55 * slot.fill;
      g.fillRect(x, y, side, side);
      g.globalAlpha = 1; g.fillStyle = theme.fg;
      if (slot.kind === "double" && side > 3) g.fillRect(x, y + side - Math.max(1, side / 6), side, Math.max(1, side / 6));
      if (slot.kind === "base" && side > 3) g.fillRect(x + side * 0.38, y + side * 0.38, side * 0.24, side * 0.24);
      if (wanted && wanted(slot)) ringed.push(i);
    }
    g.globalAlpha = 1; g.strokeStyle = theme.fg; g.lineWidth = 1.5;
    if (at && at.kind === "slot") ringed.push(at.slot);
    for (const i of ringed) g.strokeRect(i % across * cell - 0.5, Math.floor(i / across) * cell - 0.5, cell, cell);
    const top = [...owners].sort((a, b) => b[1] - a[1] || a[0] - b[0]).slice(0, 3), name = (who) => (f.owners.length ? `sequence ${f.owners[who]}` : who < 0 ? "shared base" : `expert ${who}`);
    const rest = used - top.reduce((sum, t) => sum + t[1], 0);
    setLegend(this.legend, [...top.map(([who, count]) => [`${name(who)}: ${count}`, who < 0 ? theme.mute : OKABE[who % 8]]),
      ...(rest > 0 ? [[many(owners.size - top.length, "other") + `: ${rest}`, theme.mute]] : []), [`double ${whole(kinds.double)} (bar)`, theme.fg, "line"], [`base ${whole(kinds.base)} (dot)`, theme.fg, "dot"],
      [`free ${whole(pool - used)}${kinds.free ? `, ${whole(kinds.free)} used before` : ""}`, theme.empty], ...(spilled === null ? [] : [[`spilled to a file ${whole(spilled)}`, "transparent", "none"]]),
      ...(size ? [[`${whole(size)} tokens each`, "transparent", "none"]] : []), ...(n < pool ? [[`first ${whole(n)} drawn`, "transparent", "none"]] : [])]);
    if (!this.hue.matches(":focus")) this.hue.value = f.owners.length ? "sequence" : "expert";
    this.hue.disabled = !this.board.live;
    put(this.readout, at && at.kind === "slot" ? this.describe(f, at.slot) : wanted && ringed.length ? `${many(ringed.length, "slot")} of this ${at.kind}` : "");
  }
}
