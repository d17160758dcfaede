// Prompt, Start, Pause, Stop and the live settings. Everything goes to the kernel as one small message.
class ControlsPanel {
  constructor(board) {
    this.board = board; this.ranges = new Map(); this.listed = "";
    Object.assign(this, card("controls", "Run"));
    this.foot.remove();
    const id = Math.random().toString(36).slice(2);
    this.prompt = h("textarea", {rows: "2", id: `p${id}`, spellcheck: "false"});
    this.prompt.value = board.model.get("prompt");
    this.amount = h("input", {type: "number", min: "1", max: "100000", step: "1", id: `n${id}`});
    this.amount.value = board.model.get("max_tokens");
    this.start = h("button", {class: "cl-go", type: "button"}, "▶ Start");
    this.pause = h("button", {type: "button"}, "❚❚ Pause");
    this.stop = h("button", {type: "button"}, "■ Stop");
    this.sliders = h("div", {class: "cl-sliders"});
    this.start.addEventListener("click", () => {
      for (const held of this.ranges.values()) if (held.timer) this.write(held);  // a run begins with what the hand chose
      board.send({do: "start", prompt: this.prompt.value, max_tokens: Number(this.amount.value) || 128});
    });
    this.pause.addEventListener("click", () => board.send({do: board.frame && board.frame.state === "paused" ? "resume" : "pause"}));
    this.stop.addEventListener("click", () => board.send({do: "stop"}));
    for (const field of [this.prompt, this.amount]) for (const kind of ["keydown", "keyup", "keypress"]) field.addEventListener(kind, (e) => e.stopPropagation());
    this.ask = h("div", {class: "cl-ask"}, h("label", {for: `p${id}`}, "Prompt"), h("label", {for: `n${id}`}, "at most"), this.amount, "tokens");
    this.body.append(this.ask, this.prompt, h("div", {class: "cl-buttons"}, this.start, this.pause, this.stop), this.sliders);
    board.model.on("change:controls", this.changed = () => board.redraw());
    board.model.on("change:prompt", this.asked = () => { this.prompt.value = board.model.get("prompt"); });
    board.model.on("change:max_tokens", this.counted = () => { this.amount.value = board.model.get("max_tokens"); });
  }
  dispose() {
    this.board.model.off("change:controls", this.changed);
    this.board.model.off("change:prompt", this.asked);
    this.board.model.off("change:max_tokens", this.counted);
  }
  // controls: [{name, label, unit, min, max, step, scale, zero}]; value = number in the control's unit * scale
  build(list) {
    const key = JSON.stringify(list);
    if (key === this.listed) return;
    this.listed = key; this.ranges.clear(); this.sliders.replaceChildren();
    for (const item of list) {
      const id = Math.random().toString(36).slice(2);
      const range = h("input", {type: "range", id, min: item.min, max: item.max, step: item.step, "data-name": item.name}), out = h("output", {for: id});
      const held = {range, out, item, until: 0, timer: 0};
      range.addEventListener("input", () => this.moved(held));
      for (const kind of ["keydown", "keyup"]) range.addEventListener(kind, (e) => e.stopPropagation());
      this.sliders.append(h("label", {for: id, title: item.help || ""}, item.label), range, out);
      this.ranges.set(item.name, held);
    }
  }
  say(held, value) {
    const {item, out, range} = held;
    const text = item.zero && value === 0 ? item.zero : `${plain(value)} ${item.unit}`;
    put(out, text);
    range.setAttribute("aria-valuetext", text);
  }
  moved(held) {
    const value = Number(held.range.value);
    held.until = performance.now() + 700;  // what comes back in the meantime is older than the hand
    this.say(held, value);
    clearTimeout(held.timer);
    held.timer = setTimeout(() => this.write(held), 60);
  }
  write(held) {
    clearTimeout(held.timer);
    held.timer = 0;
    this.board.send({do: "set", name: held.item.name, value: Number(held.range.value) * held.item.scale});
  }
  draw(f) {
    const can = this.board.model.get("can") || [], live = this.board.live;
    this.node.hidden = !can.length;
    this.build(this.board.model.get("controls") || []);
    const busy = f.state === "generating" || f.state === "paused";
    put(this.pause, f.state === "paused" ? "▶ Resume" : "❚❚ Pause");
    put(this.start, f.state === "replay" || f.state === "recorded" ? "▶ Play" : "▶ Start");
    this.start.disabled = !live || !can.includes("start");
    this.pause.disabled = !live || !can.includes("pause") || !(busy || f.state === "replay");
    this.stop.disabled = !live || !can.includes("stop") || !(busy || f.state === "replay");
    this.ask.hidden = this.prompt.hidden = !can.includes("prompt");
    for (const held of this.ranges.values()) {
      held.range.disabled = !live;
      const value = f.settings ? f.settings[held.item.name] : undefined;
      if (value === undefined || performance.now() < held.until || held.range.matches(":active")) continue;
      const shown = (value || 0) / held.item.scale;
      if (held.range.value !== String(shown)) held.range.value = shown;
      this.say(held, shown);
    }
  }
}
