// Traced examples: the prompt's tokens, shaded by how deep they are taken in one step.
(() => {
  const SHADES = 10; // classes s0 (faint) to s9 (full) of the style
  const traces = read("trace-data");
  if (traces.length === 0) return;
  const part = (name) => document.getElementById(`trace-${name}`);
  let trace;
  let spans = [];
  let current = null; // position of the token that is described
  let pinned = false; // whether it stays when the pointer moves on

  fill(part("choice"), traces.map((one, index) => [index, `${one.dataset}, ${one.id}: ${one.label}, seed ${one.seed}, ${one.model}`]));

  const step = () => Number(part("step").value);
  const isPrompt = (position) => position < trace.tokens.length;
  const level = (position, at) => trace.steps[at].charCodeAt(position) - "0".charCodeAt(0);
  const textOf = (position) => (isPrompt(position) ? trace.tokens[position] : trace.generated[position - trace.tokens.length]);

  function open() {
    trace = traces[part("choice").value];
    part("step").max = trace.steps.length - 1;
    part("step").value = 0;
    const shades = [["depth", "last layer that keeps the token in this step"]];
    trace.importance.forEach((_, index) => shades.push([index, `importance in layer ${index + 1} (nothing pruned)`]));
    part("shade").replaceChildren();
    fill(part("shade"), shades);
    spans = [...trace.tokens, ...trace.generated].map((text, position) => {
      const span = make("span", "", text);
      span.dataset.position = position;
      return span;
    });
    part("text").replaceChildren(...spans);
    part("text").classList.toggle("spaced", !keepsSpaces(trace.tokens));
    part("text").scrollTop = 0;
    current = null;
    pinned = false;
    draw();
  }

  // Some tokenizers' tokens lose the space before them when they are decoded one by one.
  const keepsSpaces = (tokens) => tokens.filter((token) => /^\s/.test(token)).length > 0.02 * tokens.length;

  function draw() {
    const at = step();
    const run = trace.steps[at].length; // tokens of the prompt and those generated that have been run
    const revived = new Set(trace.revived[at]);
    const shade = part("shade").value === "depth" ? depthShade(at) : importanceShade(trace.importance[part("shade").value]);
    spans.forEach((span, position) => {
      span.hidden = position >= run;
      if (span.hidden) return;
      const classes = [`s${shade(position)}`];
      if (trace.levels[level(position, at)] === 0) classes.push("never");
      if (revived.has(position)) classes.push("revived");
      if (!isPrompt(position)) classes.push("generated");
      if (position === run - 1) classes.push("newest");
      if (position === current) classes.push("current");
      span.className = classes.join(" ");
    });
    say(at, run);
    legend(at, run, revived.size);
    part("back").disabled = at === 0;
    part("on").disabled = at === trace.steps.length - 1;
    tell();
  }

  const rank = (index, count) => (count < 2 ? SHADES - 1 : Math.round(((SHADES - 1) * index) / (count - 1)));

  const depthShade = (at) => (position) => rank(level(position, at), trace.levels.length);

  // Roots: importance spans orders of magnitude.
  function importanceShade(importance) {
    const largest = importance.reduce((a, b) => Math.max(a, b), Number.MIN_VALUE);
    return (position) => (isPrompt(position) ? Math.round((SHADES - 1) * Math.sqrt(importance[position] / largest)) : 0);
  }

  function say(at, run) {
    const writes = quoted(trace.generated[at]);
    const name = at === 0 ? "Prefill reads the prompt" : `Decoding step ${at} of ${trace.steps.length - 1} reads ${quoted(textOf(run - 1))}`;
    const anew = at === 0 || trace.anew[at] ? "" : " It selects nothing anew: shown is the prefill's selection.";
    part("status").textContent = `${name} and writes ${writes}.${anew}`;
  }

  function legend(at, run, revived) {
    const n = trace.tokens.length;
    const counts = trace.levels.map(() => 0);
    for (let position = 0; position < n; position++) counts[level(position, at)] += 1;
    const items = trace.levels.map((layer, index) => {
      const share = `${counts[index].toLocaleString("en")} of the prompt's tokens (${((100 * counts[index]) / n).toFixed(1)} %)`;
      return legendItem(`s${rank(index, trace.levels.length)}${layer === 0 ? " never" : ""}`, `${described(layer)}: ${share}`);
    });
    if (part("shade").value !== "depth") items.splice(0, items.length, legendItem("s9", "shade: root of the importance, full at the layer's largest"));
    if (at > 0) items.push(legendItem("revived", `revived in this step, into layers that had not computed it: ${revived}`));
    if (at > 0) items.push(legendItem("generated", `generated: ${run - n}`));
    items.push(legendItem("newest", "the newest token, which the step's selection serves"));
    part("legend").replaceChildren(...items);
  }

  function described(layer) {
    if (layer === 0) return "dropped before the model";
    return layer === trace.layers ? `kept through all ${layer} layers` : `pruned after layer ${layer}`;
  }

  function legendItem(className, text) {
    const item = make("li");
    item.append(make("span", `sample ${className}`, "token"), make("span", "", text));
    return item;
  }

  const quoted = (text) => (text === undefined ? "nothing" : `“${visible(text)}”`);
  const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");

  function tell() {
    if (current === null || current >= trace.steps[step()].length) {
      part("token").replaceChildren(make("p", "empty", "none chosen"));
      return;
    }
    const at = step();
    const list = make("dl", "numbers");
    const add = (name, text) => {
      const pair = make("div");
      pair.append(make("dt", "", name), make("dd", "", text));
      list.append(pair);
    };
    add("text", visible(textOf(current)));
    add("position", `${current} of ${trace.tokens.length}${isPrompt(current) ? "" : ", generated"}`);
    add("in this step", described(trace.levels[level(current, at)]));
    const when = trace.revived.flatMap((positions, index) => (positions.includes(current) ? [index] : []));
    if (when.length) add("revived in step", when.join(", "));
    part("token").replaceChildren(list, ...(isPrompt(current) ? importanceOf(current) : []));
  }

  function importanceOf(position) {
    const values = trace.importance.map((layer) => layer[position]);
    const largest = values.reduce((a, b) => Math.max(a, b), Number.MIN_VALUE);
    const bars = make("table", "bars");
    bars.append(make("caption", "", "importance (Eq. 1) by layer, nothing pruned"));
    values.forEach((value, index) => {
      const row = bars.insertRow();
      const bar = make("span", "bar");
      bar.style.width = `${(100 * value) / largest}%`;
      row.append(make("th", "", String(index + 1)), make("td"), make("td", "number", value.toPrecision(4)));
      row.cells[1].append(bar);
      row.cells[2].dataset.value = value;
    });
    return [bars];
  }

  function show(position, pin) {
    if (current !== null) spans[current].classList.remove("current");
    current = position;
    pinned = pin;
    if (current !== null) spans[current].classList.add("current");
    tell();
  }

  function walk(by) {
    const last = trace.steps[step()].length - 1;
    show(current === null ? 0 : Math.min(Math.max(current + by, 0), last), true);
    spans[current].scrollIntoView({ block: "nearest" });
  }

  function go(to) {
    part("step").value = to;
    draw();
  }

  const positionAt = (event) => event.target.dataset?.position;
  part("choice").addEventListener("change", open);
  part("shade").addEventListener("change", draw);
  part("step").addEventListener("input", draw);
  part("back").addEventListener("click", () => go(step() - 1));
  part("on").addEventListener("click", () => go(step() + 1));
  part("text").addEventListener("pointerover", (event) => {
    if (!pinned && positionAt(event) !== undefined) show(Number(positionAt(event)), false);
  });
  part("text").addEventListener("click", (event) => {
    const position = positionAt(event);
    if (position !== undefined) show(Number(position), !(pinned && Number(position) === current));
  });
  part("text").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    walk(by);
  });
  open();
})();
