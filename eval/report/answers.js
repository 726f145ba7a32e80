// Answers: a card for each example, with the answers of all arms beside each other; filtered, ordered, a page at a time.
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
  fill(control("method"), choices(runs.flatMap((run) => run.arms)));
  fill(control("model"), choices(runs.map((run) => run.model)));
  control("model").parentElement.hidden = !severalModels;

  const label = (record, answer) => runs[record.run].arms[answer.arm];
  const isBaseline = (record, answer) => answer.arm === runs[record.run].baseline;

  // the answers on show: the baseline's, and those of the chosen method
  function shown(record) {
    const method = control("method").value;
    return record.answers.filter((answer) => method === "" || isBaseline(record, answer) || label(record, answer) === method);
  }

  // of an example, the worst of its answers on show counts
  const ORDERS = {
    loss: ({ gain }) => gain,
    kl: ({ kl, answer_kl }) => (answer_kl ?? kl) === null ? null : -(answer_kl ?? kl),
    score: ({ score }) => score,
    speedup: ({ speedup }) => speedup,
    pct: ({ pct }) => (pct === null ? null : -pct),
  };

  function place(record, order) {
    const values = shown(record).filter((answer) => !isBaseline(record, answer)).map(order).filter((value) => value !== null);
    return values.length ? Math.min(...values) : Number.MAX_VALUE;
  }

  function choose() {
    const [dataset, method, model] = ["dataset", "method", "model"].map((name) => control(name).value);
    const sought = control("search").value.trim().toLowerCase();
    const holds = sought === "" ? null : strings.map((text) => text.toLowerCase().includes(sought));
    const onlyDiffering = control("differs").checked;
    found = records.filter(
      (record) =>
        (dataset === "" || record.dataset === dataset) &&
        (method === "" || record.answers.some((answer) => label(record, answer) === method)) &&
        (model === "" || runs[record.run].model === model) &&
        (!onlyDiffering || shown(record).some((answer) => answer.differs)) &&
        (holds === null || texts(record).some((number) => holds[number])),
    );
    const order = ORDERS[control("order").value];
    if (order) {
      const places = new Map(found.map((record) => [record, place(record, order)]));
      found.sort((a, b) => places.get(a) - places.get(b));
    }
    turn(0);
  }

  const isStored = (number) => number !== null;

  // every text of a record that the search looks at
  const texts = (record) =>
    [record.id, record.end, ...record.gold, ...shown(record).map((answer) => answer.text)].filter(isStored);

  function turn(to) {
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    page = Math.min(Math.max(to, 0), pages - 1);
    control("list").replaceChildren(...found.slice(page * PAGE, (page + 1) * PAGE).map(card));
    control("list").start = page * PAGE + 1;
    control("count").textContent =
      `${found.length.toLocaleString("en")} of ${records.length.toLocaleString("en")} examples, page ${page + 1} of ${pages}`;
    control("back").disabled = page === 0;
    control("on").disabled = page === pages - 1;
  }

  function card(record) {
    const item = make("li", "record");
    const head = make("p", "head");
    head.append(make("strong", "", record.dataset), make("span", "id", strings[record.id]));
    const cut = record.uncut > record.tokens ? `, cut from ${record.uncut.toLocaleString("en")}` : "";
    head.append(make("span", "setting", `${record.tokens.toLocaleString("en")} prompt tokens${cut}`));
    if (severalModels) head.append(make("span", "model", runs[record.run].model));
    const columns = make("div", "columns");
    const gold = record.gold.map((number) => make("pre", "", strings[number]));
    columns.append(
      column("Prompt end", [make("pre", "", strings[record.end] || "not stored")], "prompt"),
      column("Gold", gold.length ? gold : [make("p", "empty", "not stored")], "gold"),
    );
    const reference = record.answers.find((answer) => isBaseline(record, answer));
    for (const answer of shown(record)) {
      const parts = [numbers(answer), written(answer, reference)];
      columns.append(column(label(record, answer), parts, answer === reference ? "baseline" : "method"));
    }
    item.append(head, columns);
    return item;
  }

  function written(answer, reference) {
    if (!isStored(answer.text)) return make("p", "empty", "not stored");
    if (answer === reference || !reference) return make("pre", "", strings[answer.text]);
    return beside(answer, reference);
  }

  function numbers({ score, gain, ttft, speedup, kl, answer_kl, pct, tokens }) {
    const list = make("dl", "numbers");
    const add = (name, text, className) => {
      const pair = make("div", className);
      pair.append(make("dt", "", name), make("dd", "", text));
      list.append(pair);
    };
    const trend = gain > 0 ? "better" : gain < 0 ? "worse" : "";
    add("score", score.toFixed(1) + { better: " ▲", worse: " ▼", "": "" }[trend], trend);
    add("TTFT", seconds(ttft) + (speedup === null ? "" : `, ${speedup.toFixed(2)}×`), "");
    if (answer_kl !== null) add("answer's KL", answer_kl.toPrecision(3), "");
    if (kl !== null) add("KL", kl.toPrecision(3), "");
    if (pct !== null) add("% computed", pct.toFixed(1), "");
    add("tokens", `${tokens ?? "-"}`, "");
    return list;
  }

  const seconds = (value) => (value < 1 ? `${(1000 * value).toFixed(1)} ms` : `${value.toFixed(2)} s`);

  function column(heading, content, className) {
    const element = make("section", className);
    element.append(make("h4", "", heading), ...content);
    return element;
  }

  // The answer, with the words marked that the baseline's lacks.
  function beside(answer, reference) {
    if (answer.text === reference.text) return make("p", "empty", "the baseline's answer");
    const [ours, theirs] = [strings[answer.text], strings[reference.text]].map(words);
    return marked(ours, commonWords(ours, theirs)?.[0]);
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
