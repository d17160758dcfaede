// Keep a run, look at it beside another one. What is shown is the kernel's own words (view/kept.py).
class ComparePage {
  constructor(board) {
    this.board = board; this.title = "Compare";
    const id = Math.random().toString(36).slice(2);
    this.name = own(h("input", {id: `k${id}`, maxlength: "40", size: "10", spellcheck: "false"}));
    this.keep = h("button", {type: "button", class: "cl-go"}, "Keep this run");
    this.keep.addEventListener("click", () => { board.send({do: "keep", name: this.name.value}); this.name.value = ""; });
    this.name.addEventListener("keydown", (e) => { if (e.key === "Enter") this.keep.click(); });
    [this.a, this.b] = ["A", "B"].map((side) => own(h("select", {"aria-label": `run ${side}`})));
    for (const pick of [this.a, this.b]) pick.addEventListener("change", () => board.send({do: "compare", a: this.a.value, b: this.b.value}));
    this.drop = h("button", {type: "button"}, "Forget B");
    this.drop.addEventListener("click", () => board.send({do: "forget", name: this.b.value}));
    this.picks = h("span", {class: "cl-picks"}, this.a, "beside", this.b, this.drop);
    this.table = h("table", {class: "cl-table"});
    this.say = h("p", {class: "cl-verdict", role: "status"});
    this.node = h("div", {class: "cl-compare"}, h("div", {class: "cl-keep"}, h("label", {for: `k${id}`}, "name"), this.name, this.keep, this.picks), this.table, this.say);
  }
  told(all) {
    const names = all.names || [];
    this.name.placeholder = all.next || "A";
    this.picks.hidden = names.length < 2;
    for (const [pick, chosen] of [[this.a, all.a], [this.b, all.b || all.a]]) {
      pick.replaceChildren(...names.map((name) => h("option", {value: name}, name)));
      if (chosen) pick.value = chosen;
    }
    put(this.drop, `Forget ${all.b || all.a || ""}`);
    const head = ["", all.a, all.b, all.b ? "difference" : ""].map((text) => h("th", {scope: "col"}, text || ""));
    const better = all.better || {};
    const rows = (all.rows || []).map(([label, a, b, change]) => h("tr", null, h("th", {scope: "row"}, label), h("td", null, a), h("td", null, b),
      h("td", {class: better[label] ? `cl-ahead-${better[label]}` : ""}, better[label] ? `${change} · ${better[label] === "B" ? all.b : all.a} better` : change)));
    this.table.replaceChildren(...(rows.length ? [h("thead", null, h("tr", null, ...head)), h("tbody", null, ...rows)] : []));
    put(this.say, all.verdict || "Keep a run, change a setting, run it again and keep that too: both stand side by side here.");
  }
  draw(f) { this.keep.disabled = !this.board.live || !f.decoded; }
}
