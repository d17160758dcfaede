// What is pointed at, by pointer or keyboard, in any view of a board: all panels mark what they know of it.
// kinds: expert {layer, expert}, layer {layer}, token {at: its place in the text or -1, nth: its column of all or -1},
// slot {slot}, bin {bin}, column {column}: a moment of the systems, budget {place}: one of the what-if's

// the column i of the strip, as a focus
function tokenFocus(f, i) {
  return {kind: "token", nth: f.shown - f.a.flag.length + i, at: f.a.flag[i] & 4 ? f.a.place[i] + 1 : -1};
}

// the strip's column of a focused token, -1 where it is not (or no longer) there
function stripColumn(f, focus) {
  if (!focus || focus.kind !== "token") return -1;
  const n = f.a.flag.length;
  if (focus.at >= 0) {
    for (let i = n - 1; i >= 0; i--) if (f.a.flag[i] & 4 && f.a.place[i] + 1 === focus.at) return i;
    return -1;
  }
  const i = focus.nth - f.shown + n;
  return i >= 0 && i < n ? i : -1;
}

// the systems' column that token i of the strip fell into, 255 where there is none; they come in blocks of their own
function momentOf(f, i) {
  const at = f.a.when.length - 1 - (f.until - (f.shown - f.a.flag.length + i + 1));
  return at >= 0 && at < f.a.when.length ? f.a.when[at] : 255;
}

// the text's piece of column i, null where it is another sequence's or gone
const pieceOf = (story, f, i) => (f.a.flag[i] & 4 ? story.find(f.a.place[i] + 1) : null);

// the piece of the focused token, null where nothing of it is known
function focusedPiece(story, f, focus) {
  if (!focus || focus.kind !== "token") return null;
  const i = stripColumn(f, focus);
  return focus.at >= 0 ? story.find(focus.at) : i >= 0 ? pieceOf(story, f, i) : null;
}

// the columns whose tokens went to an expert
function columnsOf(story, f, layer, expert) {
  const found = [];
  for (let i = 0; i < f.a.flag.length; i++) {
    const piece = pieceOf(story, f, i);
    if (piece && visits(piece, layer, expert)) found.push(i);
  }
  return found;
}

const marked = (f, which, i) => {
  const all = f.a.mark, rows = all.length ? all.shape[0] : 0;  // two, or three where some are on the GPU
  return which < rows ? all[which * (all.length / rows) + (i >> 3)] >> (i & 7) & 1 : 0;
};

// the expert that owns the focused slot: {layer, who}; null where it is free, shared or told by sequence
function ownerOf(f, focus) {
  const slot = focus && focus.kind === "slot" && !f.owners.length ? slotOf(f, focus.slot) : null;
  return slot && slot.kind !== "free" && !slot.shared ? slot : null;
}
