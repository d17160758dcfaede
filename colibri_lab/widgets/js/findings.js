// What stands out, in a sentence each: nobody should have to look for it.
// all: the what-if's curves, where somebody looked at them
function findings(f, all) {
  const said = [], faults = f.a.fault, total = faults.reduce((a, b) => a + b, 0);
  if (total) {
    const worst = faults.indexOf(Math.max(...faults));
    said.push(`Layer ${worst} faults most: ${whole(faults[worst])} of ${many(total, "fault")} (${percent(faults[worst] / total)}).`);
  }
  if (f.decoded) said.push(`One token in a hundred takes longer than ${ms(f.ms[2])} (P99), half of them less than ${ms(f.ms[0])}.`);
  const policy = all && all.steps ? better(all) : "";
  return policy ? [...said, policy] : said;
}

// which policy would hit most at the engine's own budget; empty where it is not worked out
function better(all) {
  if (all.now === null || all.now === undefined || all.behind) return "";
  const rates = Object.entries(all.lines).filter(([name, values]) => !name.startsWith("Belady") && values[all.now] !== null).map(([name, values]) => [name, values[all.now]]);
  const now = rates.find(([name]) => name === all.policy), [name, rate] = rates.reduce((a, b) => (b[1] > a[1] ? b : a), ["", -1]);
  if (!now || rate < 0) return "";
  return rate > now[1] ? `At this budget ${name} would have hit most: ${percent(rate)}, ${now[0]} ${percent(now[1])}.` : `At this budget no policy would have hit more than ${now[0]}: ${percent(now[1])}.`;
}
