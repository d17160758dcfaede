// One token: its route, what it was chosen from, what its step cost. The kernel is asked, nothing comes with frames.
class TokenPanel {
  constructor(board) {
    this.board = board; this.closed = false;
    Object.assign(this, card("token", "Token"));
    this.node.setAttribute("aria-live", "polite");
    const button = (words, act) => { const node = h("button", {type: "button"}, words); node.addEventListener("click", act); return node; };
    this.go = button("Show this moment", () => board.send({do: "seek", token: this.all.number}));
    this.close = button("Close", () => this.shut());
    this.foot.append(h("span", {class: "cl-file"}, this.go, this.close));
    board.model.on("change:detail", this.told = () => { this.closed = false; this.build(); board.redraw(); });
    this.build();
  }
  dispose() { this.board.model.off("change:detail", this.told); }
  get all() { const all = this.board.model.get("detail"); return all && all.number !== undefined ? all : null; }
  get open() { return Boolean(this.all) && !this.closed; }
  ask(position) { this.closed = false; this.board.send({do: "token", sequence: this.board.story.sequence, position}); this.board.redraw(); }
  shut() { this.closed = true; this.board.redraw(); }
  // is this piece of the shown text the token?
  is(piece) { return this.open && this.all.position === piece.at && this.all.sequence === this.board.story.sequence; }
  build() {
    const all = this.all;
    if (!all) return;
    put(this.sub, `number ${whole(all.number)}, position ${whole(all.position)} of request ${all.sequence}`);
    put(this.node.querySelector(".cl-head b"), `Token ${JSON.stringify(all.text)}`);
    const kinds = {"": ["", ""], "read": ["cl-read-now", "read"], "read ahead": ["cl-read-ahead", "ahead"]};
    const layers = all.experts.map((experts, layer) => h("tr", null, h("th", {scope: "row"}, `layer ${layer}`), ...experts.map((expert, i) =>
      h("td", {class: kinds[all.reads[layer][i]][0]}, `expert ${expert}`, h("i", {style: `width:${Math.round(26 * (all.weights[layer][i] || 0))}px`}), ` ${num(all.weights[layer][i])} ${kinds[all.reads[layer][i]][1]}`))));
    const odds = all.best.map(([text, share]) => h("tr", {class: share === all.probability ? "on" : ""}, h("th", {scope: "row"}, JSON.stringify(text)), h("td", null, h("i", {style: `width:${Math.round(70 * share)}px`}), ` ${percent(share)}`)));
    if (all.probability !== null && !all.best.some(([, share]) => share === all.probability)) odds.push(h("tr", {class: "on"}, h("th", {scope: "row"}, JSON.stringify(all.text)), h("td", null, percent(all.probability))));
    const none = "What it was chosen from is not on record: turn telemetry_top_logprobs on (Tuner) before the run.";
    const facts = [["its step", `${ms(all.latency_ms)}, ${many(all.rows, "row")}`], ...Object.entries(all.stages_ms).filter(([, v]) => v > 0).map(([name, v]) => [name, ms(v)]),
      ["expert faults", whole(all.faults)], ["hits", whole(all.hits)], ["evicted", whole(all.evictions)], ["read", bytes(all.bytes_read)]];
    this.body.replaceChildren(h("div", {class: "cl-token-split"},
      h("div", {class: "cl-route", tabindex: "0", role: "group", "aria-label": "route through the layers"}, h("table", null, h("tbody", null, ...layers))),
      h("div", null, odds.length ? h("table", {class: "cl-odds", "aria-label": "what it was chosen from"}, h("tbody", null, ...odds)) : h("p", {class: "cl-sub"}, none),
        h("dl", {class: "cl-figures"}, ...facts.map(([label, value]) => h("div", null, h("dt", null, label), h("dd", null, value)))))));
    setLegend(this.legend, [["read for it", FAULT], ["read ahead", HIT], ["in memory", MEMORY]]);
  }
  draw(f) {
    this.node.hidden = !this.open;
    if (this.open) this.go.disabled = !this.board.live || !f.past || this.all.number < f.past.first;
  }
}
