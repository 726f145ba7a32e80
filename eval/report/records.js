// Records: filtered, ordered, a page of them at a time.
(() => {
  const PAGE = 20;
  const LARGEST_DIFF = 4e6; // words of one answer times words of the other
  const { runs, records, strings } = read("record-data");
  const control = (name) => document.getElementById(`record-${name}`);
  let found = [];
  let page = 0;

  const distinct = (values) => [...new Set(values)];
  const severalModels = distinct(runs.map((run) => run.model)).length > 1;
  const choices = (values) => [["", "all"], ...distinct(values).map((value) => [value, value])];
  fill(control("dataset"), choices(records.map((record) => record.dataset)));
  fill(control("method"), choices(runs.map((run) => run.label)));
  fill(control("model"), choices(runs.map((run) => run.model)));
  control("model").parentElement.hidden = !severalModels;

  const differs = ({ method, baseline }) => baseline !== null && method.text !== baseline.text;
  const speedup = ({ method, baseline }) => (baseline === null ? NaN : baseline.ttft / method.ttft);
  const gain = ({ method, baseline }) => (baseline === null ? NaN : method.score - baseline.score);
  const ORDERS = {
    loss: gain,
    kl: ({ method }) => (method.kl === null ? NaN : -method.kl),
    score: (record) => record.method.score,
    speedup,
    pct: (record) => -record.method.pct,
  };

  function choose() {
    const [dataset, method, model] = ["dataset", "method", "model"].map((name) => control(name).value);
    const sought = control("search").value.trim().toLowerCase();
    const holds = sought === "" ? null : strings.map((text) => text.toLowerCase().includes(sought));
    const onlyDiffering = control("differs").checked;
    found = records.filter(
      (record) =>
        (dataset === "" || record.dataset === dataset) &&
        (method === "" || runs[record.run].label === method) &&
        (model === "" || runs[record.run].model === model) &&
        (!onlyDiffering || differs(record)) &&
        (holds === null || texts(record).some((number) => holds[number])),
    );
    const order = ORDERS[control("order").value];
    if (order) found.sort((a, b) => lastIfNone(order(a)) - lastIfNone(order(b)));
    turn(0);
  }

  // every text of a record that the search looks at
  function texts({ id, end, gold, method, baseline }) {
    return [id, end, ...gold, method.text, ...(baseline === null ? [] : [baseline.text])];
  }

  const lastIfNone = (value) => (Number.isNaN(value) ? Number.MAX_VALUE : value);

  function turn(to) {
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    page = Math.min(Math.max(to, 0), pages - 1);
    control("list").replaceChildren(...found.slice(page * PAGE, (page + 1) * PAGE).map(card));
    control("list").start = page * PAGE + 1;
    control("count").textContent =
      `${found.length.toLocaleString("en")} of ${records.length.toLocaleString("en")} records, page ${page + 1} of ${pages}`;
    control("back").disabled = page === 0;
    control("on").disabled = page === pages - 1;
  }

  function card(record) {
    const { method, baseline } = record;
    const run = runs[record.run];
    const item = make("li", "record");
    const head = make("p", "head");
    head.append(
      make("strong", "", record.dataset),
      make("span", "id", strings[record.id]),
      make("span", "setting", `${run.label}, seed ${run.seed}`),
    );
    if (severalModels) head.append(make("span", "model", run.model));
    const columns = make("div", "columns");
    const [ofMethod, ofBaseline] = answers(record);
    columns.append(
      column("Prompt end", [make("pre", "", strings[record.end] || "not stored")], "prompt"),
      column("Answer", [ofMethod], "method"),
      column("Baseline's answer", [ofBaseline], "baseline"),
      column("Gold", gold(record), "gold"),
    );
    item.append(head, numbers(record, method, baseline), columns);
    return item;
  }

  function numbers(record, method, baseline) {
    const list = make("dl", "numbers");
    const add = (name, text, className) => {
      const pair = make("div", className);
      pair.append(make("dt", "", name), make("dd", "", text));
      list.append(pair);
    };
    const change = gain(record);
    const trend = change > 0 ? "better" : change < 0 ? "worse" : "";
    const sign = { better: " ▲", worse: " ▼", "": "" }[trend];
    add("score", method.score.toFixed(1) + sign, trend);
    if (baseline !== null) add("baseline", baseline.score.toFixed(1), "");
    add("TTFT", seconds(method.ttft), "");
    if (baseline !== null) add("TTFT speedup", `${speedup(record).toFixed(2)}×`, "");
    if (method.kl !== null) add("KL", `${method.kl.toPrecision(3)} nats`, "");
    if (method.pct !== null) add("% computed", method.pct.toFixed(1), "");
    add("prompt tokens", record.tokens.toLocaleString("en") + (record.uncut > record.tokens ? `, cut from ${record.uncut.toLocaleString("en")}` : ""), "");
    add("answer tokens", [method, baseline].filter((side) => side !== null).map((side) => side.tokens ?? "-").join(", baseline "), "");
    return list;
  }

  const seconds = (value) => (value < 1 ? `${(1000 * value).toFixed(1)} ms` : `${value.toFixed(2)} s`);

  function column(heading, content, className) {
    const element = make("section", className);
    element.append(make("h4", "", heading), ...content);
    return element;
  }

  function gold({ gold: numbers_ }) {
    if (numbers_.length === 0) return [make("p", "empty", "not stored")];
    return numbers_.map((number) => make("pre", "", strings[number]));
  }

  function answers({ method, baseline }) {
    if (baseline === null) return [make("pre", "", strings[method.text]), make("p", "empty", "not measured beside it")];
    if (method.text === baseline.text) return [make("pre", "", strings[method.text]), make("p", "empty", "the same")];
    const [ours, theirs] = [strings[method.text], strings[baseline.text]].map(words);
    const same = commonWords(ours, theirs);
    return [marked(ours, same?.[0]), marked(theirs, same?.[1])];
  }

  const words = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];

  // The words, with those marked that the other answer lacks; none are where the answers are too long to compare.
  function marked(parts, same) {
    const element = make("pre");
    for (let start = 0, end; start < parts.length; start = end) {
      const isSame = !same || same[start];
      for (end = start + 1; end < parts.length && (!same || same[end] === isSame); ) end++;
      const text = parts.slice(start, end).join("");
      element.append(isSame ? text : make("mark", "", text));
    }
    if (!same) element.append(make("span", "empty", " (too long to mark differences)"));
    return element;
  }

  // For each word of both, whether it belongs to their longest common subsequence; null where that costs too much.
  function commonWords(a, b) {
    if (a.length * b.length > LARGEST_DIFF) return null;
    const width = b.length + 1;
    const lengths = new Uint16Array((a.length + 1) * width); // of the rest of a from i and of b from j
    for (let i = a.length - 1; i >= 0; i--) {
      for (let j = b.length - 1; j >= 0; j--) {
        const here = i * width + j;
        lengths[here] = a[i] === b[j] ? 1 + lengths[here + width + 1] : Math.max(lengths[here + width], lengths[here + 1]);
      }
    }
    const same = [new Array(a.length).fill(false), new Array(b.length).fill(false)];
    for (let i = 0, j = 0; i < a.length && j < b.length; ) {
      if (a[i] === b[j]) same[0][i++] = same[1][j++] = true;
      else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i++;
      else j++;
    }
    return same;
  }

  for (const name of ["dataset", "method", "model", "order", "differs"]) control(name).addEventListener("change", choose);
  control("search").addEventListener("input", debounced(choose, 150));
  control("controls").addEventListener("submit", (event) => event.preventDefault());
  control("back").addEventListener("click", () => turn(page - 1));
  control("on").addEventListener("click", () => turn(page + 1));
  choose();
})();
