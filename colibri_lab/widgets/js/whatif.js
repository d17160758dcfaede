// What each policy would have hit at other budgets (analysis/shadow.py), and where the engine stands.
class WhatIfPage {
  constructor(board) {
    this.board = board; this.title = "What if"; this.watched = true;
    this.chart = h("div", {class: "cl-chart"}); this.facts = h("dl", {class: "cl-figures"});
    this.legend = h("div", {class: "cl-legend cl-foot"}); this.say = h("div", {class: "cl-words", role: "status"});
    this.split = h("div", {class: "cl-split"}, h("div", null, this.chart, this.legend), this.facts);
    this.tools = h("div", {class: "cl-tools cl-right"}); this.body = this.split; this.foot = this.say;
    this.node = h("div", {class: "cl-whatif"}, this.tools, this.split, this.say);
    this.tabled = new TableView(board, this, "What if");
    board.model.on("change:whatif", this.changed = () => board.redraw());
  }
  dispose() { this.board.model.off("change:whatif", this.changed); }
  told() {}
  get all() { const all = this.board.model.get("whatif") || {}; return all.steps ? all : null; }
  at(share) { return 44 + share / 100 * (this.surface.width - 58); }
  pick(x) {
    const all = this.all;
    if (!all) return null;
    const far = all.x.map((share) => Math.abs(this.at(share) - x));
    return {kind: "budget", place: far.indexOf(Math.min(...far))};
  }
  walk(dx) {
    const all = this.all, here = this.board.focus;
    if (!all) return null;
    const from = here && here.kind === "budget" ? here.place + dx : all.now === null ? 0 : all.now;
    return {kind: "budget", place: Math.max(0, Math.min(all.x.length - 1, from))};
  }
  words(all, i) {
    const rates = Object.entries(all.lines).filter(([, values]) => values[i] !== null).map(([name, values]) => `${name} ${percent(values[i])}`);
    return `${many(all.experts[i], "expert")} in memory, ${plain(all.x[i])} % of all: ${rates.join(", ")}`;
  }
  table() {
    const all = this.all;
    if (!all) return {caption: "Start a run: shadow caches then show what each policy would have hit.", head: [], rows: []};
    const names = Object.keys(all.lines);
    return {caption: `Expert hits over ${many(all.steps, "step")} by budget; the engine (${all.policy}) had ${percent(all.rate)}`, head: ["experts in memory", ...names],
      rows: all.x.map((share, i) => [`${whole(all.experts[i])}, ${plain(share)} % of all${i === all.now ? ": now" : ""}`, ...names.map((name) => percent(all.lines[name][i]))])};
  }
  draw() {
    const all = this.all, focus = this.board.focus, here = focus && focus.kind === "budget" && all ? focus.place : -1;
    this.split.hidden = !all;
    if (!this.surface) this.surface = new Surface(this.board, {body: this.chart, tabled: this.tabled}, 210, {pick: (x) => this.pick(x), walk: (dx) => this.walk(dx)});
    if (!all) return put(this.say, "Start a run: shadow caches then show what each policy would have hit at other budgets.");
    const names = Object.keys(all.lines), place = here >= 0 ? here : all.now === null ? all.x.length - 1 : all.now;
    const ranked = names.filter((name) => all.lines[name][place] !== null).sort((a, b) => all.lines[b][place] - all.lines[a][place]);
    const rows = [[here >= 0 || all.now === null ? `at ${plain(all.x[place])} %` : "at the budget now", many(all.experts[place], "expert")], ...ranked.map((name) => [name, percent(all.lines[name][place])]),
      [`engine (${all.policy}${all.prefetcher === "none" ? "" : `, ${all.prefetcher}`})`, percent(all.rate)]];
    const key = JSON.stringify(rows);
    if (this.key !== key) { this.key = key; this.facts.replaceChildren(...rows.map(([label, value]) => h("div", null, h("dt", null, label), h("dd", null, value)))); }
    const late = all.behind ? `, of which ${whole(all.steps - all.behind)} are worked out: the rest follows when it rests` : "";
    put(this.say, here >= 0 ? this.words(all, here) : `${many(all.steps, "step")} of the run${late}. ${better(all)} Belady knows the future: no cache does better.`.replace("  ", " "));
    setLegend(this.legend, [...names.map((name, i) => [name, OKABE[i], i > 4 ? "dash" : "line"]), ["engine now", MARK, "ring"]]);
    const g = this.surface.begin(`Expert hits by budget. ${this.words(all, place)}. The engine: ${percent(all.rate)}`), theme = this.board.theme;
    const top = 8, zero = this.surface.height - 22, y = (v) => zero - v * (zero - top);
    g.fillStyle = theme.mute;
    for (const v of [0, 0.25, 0.5, 0.75, 1]) {
      g.textAlign = "right"; g.fillText(`${100 * v} %`, 38, y(v));
      g.strokeStyle = theme.line; g.lineWidth = 1; g.beginPath(); g.moveTo(44, y(v)); g.lineTo(this.at(100), y(v)); g.stroke();
    }
    g.textAlign = "center";
    for (let share = 20; share <= 100; share += 20) g.fillText(share === 100 ? "all" : `${share} %`, this.at(share) - (share === 100 ? 4 : 0), zero + 12);
    names.forEach((name, i) => {
      g.strokeStyle = OKABE[i]; g.lineWidth = 2; g.setLineDash(i > 4 ? [5, 3] : []); g.beginPath();
      all.lines[name].forEach((v, j) => { if (v !== null) g.lineTo(this.at(all.x[j]), y(v)); });
      g.stroke();
    });
    g.setLineDash([]);
    if (here >= 0) { g.strokeStyle = theme.fg; g.lineWidth = 1; g.beginPath(); g.moveTo(this.at(all.x[here]), top); g.lineTo(this.at(all.x[here]), zero); g.stroke(); }
    if (all.now !== null && all.rate !== null) { g.strokeStyle = MARK; g.lineWidth = 3; g.beginPath(); g.arc(this.at(all.x[all.now]), y(all.rate), 6, 0, 7); g.stroke(); }
  }
}
