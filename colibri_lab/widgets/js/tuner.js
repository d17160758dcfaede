// Every live setting as a control; what there is comes from the config's schema (widgets/tuner.py).
class TunerPage {
  constructor(board) {
    this.board = board; this.title = "Tuner"; this.fields = new Map();
    const all = board.model.get("tuner") || {}, id = Math.random().toString(36).slice(2);
    board.model.on("change:tuned", this.changed = () => board.redraw());
    const rows = (all.live || []).map((item) => this.row(item, `${id}${item.name}`));
    const fixed = h("dl", {class: "cl-figures"}, ...(all.fixed || []).map(([name, value, help]) => h("div", {title: help}, h("dt", null, name), h("dd", null, value))));
    this.node = h("div", {class: "cl-tuner"}, ...(rows.length ? [h("div", {class: "cl-tune"}, ...rows),
      h("details", null, h("summary", null, `${many(all.fixed.length, "setting")} need a new engine: load it with them`), fixed)]
      : [h("p", {class: "cl-off"}, "A recorded run has no settings to change.")]));
  }
  row(item, id) {
    const list = item.options.map((name) => h("option", {value: name}, name));
    const field = own(list.length ? h("select", {id, "aria-describedby": `${id}h`}, ...list) : h("input", {id, "aria-describedby": `${id}h`, autocomplete: "off", spellcheck: "false"}));
    const wrong = h("span", {class: "cl-wrong", role: "alert"});
    field.addEventListener("change", () => {
      const mark = Math.random().toString(36).slice(2, 14), value = field.value;
      this.fields.get(item.name).sent = {mark, value};
      this.board.send({do: "tune", name: item.name, value, mark});
    });
    if (!list.length) field.addEventListener("keydown", (e) => { if (e.key === "Escape") { field.value = field.dataset.value; field.blur(); } });
    this.fields.set(item.name, {field, wrong, sent: null});
    const about = [item.unit, item.range, `default ${item.default}`].filter(Boolean).join(" · ");
    return h("div", {class: "cl-setting"}, h("label", {for: id, title: item.name}, item.label), field, h("small", {id: `${id}h`, title: item.help}, about), wrong);
  }
  told() {}
  dispose() { this.board.model.off("change:tuned", this.changed); }
  draw() {
    const tuned = this.board.model.get("tuned") || {}, heard = tuned.heard || [];
    for (const [name, row] of this.fields) {
      const {field, wrong, sent} = row;
      const value = (tuned.values || {})[name], said = (tuned.wrong || {})[name] || "";
      field.disabled = !this.board.live;
      if (sent && this.board.live && !heard.includes(sent.mark)) continue;  // what is told is older
      row.sent = null;
      put(wrong, said);
      wrong.hidden = !said;
      field.setAttribute("aria-invalid", said ? "true" : "false");
      if (value === undefined) continue;
      // what a hand is writing stays; so does what was refused, beside the reason
      const writing = document.activeElement === field && field.tagName === "INPUT" && field.value !== field.dataset.value;
      if (said || (writing && !(sent && sent.value === field.value))) continue;
      if (field.tagName === "SELECT" && ![...field.options].some((option) => option.value === value)) field.append(h("option", {value}, value));
      if (field.dataset.value !== value || field.value !== value) field.value = value;
      field.dataset.value = value;
    }
  }
}
