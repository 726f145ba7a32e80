"use strict";
// A heading sorts its table by its column, a second time the other way. Cells without a number come last.
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => sortBy(button.closest("th")));

function sortBy(heading) {
  const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  const body = heading.closest("table").tBodies[0];
  const cell = (row) => row.cells[heading.cellIndex];
  const isNumeric = [...body.rows].some((row) => cell(row).dataset.value);
  body.append(...[...body.rows].sort((a, b) => compare(cell(a), cell(b), sign, isNumeric)));
}

function compare(a, b, sign, isNumeric) {
  if (!isNumeric) return sign * a.textContent.localeCompare(b.textContent, "en", { numeric: true });
  const [x, y] = [a.dataset.value, b.dataset.value];
  return x && y ? sign * (Number(x) - Number(y)) : !x - !y;
}
