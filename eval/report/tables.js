"use strict";
// Tables: a heading sorts by its column, a select box leaves the rows that have a value.

for (const table of document.querySelectorAll("table")) {
  const headings = [...table.querySelectorAll("th")];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => sortBy(table, headings, column));
  });
}

for (const select of document.querySelectorAll("select[data-filters]")) {
  const rows = document.querySelectorAll(`[id="${select.dataset.filters}"] tr`);
  const column = select.dataset.column;
  const choose = () => {
    for (const row of rows) {
      row.cells[column].hidden = select.value !== ""; // all rows on show have the same there
      row.hidden = select.value !== "" && row.cells[column].tagName === "TD" && row.cells[column].textContent !== select.value;
    }
  };
  select.addEventListener("change", choose);
  choose();
}

function sortBy(table, headings, column) {
  const direction = headings[column].getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const heading of headings) heading.removeAttribute("aria-sort");
  headings[column].setAttribute("aria-sort", direction);
  const numeric = headings[column].classList.contains("number");
  const sign = direction === "ascending" ? 1 : -1;
  const body = table.tBodies[0];
  // Array.sort is stable: rows that are equal here keep the order of the column sorted before
  const rows = [...body.rows].sort((a, b) => sign * compareCells(a.cells[column], b.cells[column], numeric, sign));
  body.append(...rows);
}

// Cells without a number come last in both directions.
function compareCells(a, b, numeric, sign) {
  if (!numeric) return a.textContent.localeCompare(b.textContent, "en", { numeric: true });
  const [x, y] = [a.dataset.value, b.dataset.value];
  if (x === undefined || y === undefined) return sign * ((x === undefined) - (y === undefined));
  return Number(x) - Number(y);
}

// ------------------------------------------------------------------------------------------- what the others share

function read(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

// An element with text, never markup: what stands in a record is a stranger's.
function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function fill(select, choices) {
  for (const [value, text] of choices) select.append(new Option(text, value));
}

function debounced(action, milliseconds) {
  let waiting;
  return () => {
    clearTimeout(waiting);
    waiting = setTimeout(action, milliseconds);
  };
}
