// The figures at the top: what it does, how fast, how much of it is in memory.
const STATES = {idle: ["■", "idle"], generating: ["▶", "generating"], paused: ["❚❚", "paused"], stopping: ["■", "stopping"],
  error: ["✕", "error"], replay: ["▶", "replaying"], recorded: ["■", "recorded"]};

class Tiles {
  constructor(board) {
    this.board = board; this.tile = {};
    this.node = h("div", {class: "cl-tiles", role: "group", "aria-label": "figures"});
    for (const [name, title] of [["state", "now"], ["rate", "tokens/s"], ["ms", "ms a token, P50"],
      ["ttft", "to first token"], ["hits", "expert hits"], ["memory", "experts in memory"], ["kv", "KV slots"]]) {
      const t = {title: h("small", null, title), big: h("b"), more: h("span"), bar: h("div", {class: "cl-bar", "aria-hidden": "true"}, h("i"), h("u"))};
      t.node = h("div", {class: `cl-tile cl-tile-${name}`}, t.title, t.big, t.more, t.bar);
      this.tile[name] = t; this.node.append(t.node);
    }
    this.says = h("p", {class: "cl-findings", "aria-label": "what stands out"}); this.at = 0;
    this.node.append(this.says);
  }
  set(name, big, more, share, mark) {
    const t = this.tile[name];
    put(t.big, big); put(t.more, more || "");
    t.bar.hidden = share === undefined || share === null;
    if (t.bar.hidden) return;
    t.bar.children[0].style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
    t.bar.children[1].hidden = mark === undefined || mark === null;
    if (!t.bar.children[1].hidden) t.bar.children[1].style.left = `${Math.max(0, Math.min(1, mark)) * 100}%`;
  }
  // "3.00", "of 4.00 MiB": the unit only once where both have the same
  part(some, limit) {
    const [value, unit] = bytes(some).split(" ");
    if (!limit) return [value, unit];
    return bytes(limit).endsWith(unit) ? [value, `of ${bytes(limit)}`] : [`${value} ${unit}`, `of ${bytes(limit)}`];
  }
  // where the bar's mark stands: the share of all experts that the engine may keep, or that the what-if is pointed at
  aim(now) {
    const at = this.board.focus, {x} = this.board.model.get("whatif") || {};
    return at && at.kind === "budget" && x ? x[at.place] / 100 : now || null;
  }
  draw(f) {
    const [icon, word] = STATES[f.state] || ["", f.state], of = f.max_tokens;
    this.set("state", `${icon} ${word}`, f.made !== undefined ? of ? `${whole(f.made)} of ${many(of, "token")}` : many(f.made, "token") : "", of ? f.made / of : null);
    if (f.past && f.past.at >= 0 && f.state !== "replay") this.set("state", "◷ held", `token ${whole(f.past.at)}`);
    this.tile.state.node.dataset.state = f.state;
    const pace = f.settings && f.settings.pace;
    this.set("rate", num(f.rate || null), pace ? `last 2 s, pace ${plain(pace)}` : "last 2 s");
    const [p50, p95, p99] = f.ms, some = f.decoded > 0;
    this.set("ms", some ? num(p50) : "–", some ? `P95 ${num(p95)} · P99 ${num(p99)}` : "");
    this.set("ttft", ms(f.ttft), f.prompt ? `prompt of ${many(f.prompt, "token")}` : "");
    this.set("hits", percent(f.hits), f.hits_all === null ? "" : `last 64 · run ${percent(f.hits_all)}`, f.hits);
    const total = f.total || f.budget;
    if (f.resident_bytes !== null) this.set("memory", ...this.part(f.resident_bytes, f.budget), total ? f.resident_bytes / total : null, total ? this.aim(f.budget / total) : null);
    else this.set("memory", whole(f.resident), `of ${whole(f.L * f.E)} experts`, f.resident / (f.L * f.E));
    if (performance.now() - this.at > 500 || f.state !== "generating") {
      this.at = performance.now();
      put(this.says, findings(f, this.board.model.get("whatif")).join(" "));
      this.says.hidden = !this.says.textContent;
    }
    this.set("kv", whole(f.kv[0]), `of ${whole(f.kv[1])}`, f.kv[1] ? f.kv[0] / f.kv[1] : null);
  }
}
