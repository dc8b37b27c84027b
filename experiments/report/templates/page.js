"use strict";
(() => {
  const find = (id) => document.getElementById(id);
  const table = find("table"), body = table.tBodies[0], rows = [...body.rows];
  const verdict = find("verdict"), figure = find("figure"), words = find("words"), shown = find("shown");
  const sides = [...document.querySelectorAll("input[name=side]")];

  function filter() {
    const chosen = new Set(sides.filter((side) => side.checked).map((side) => side.value));
    table.querySelectorAll("[data-side]").forEach((cell) => { cell.hidden = !chosen.has(cell.dataset.side); });
    const wanted = words.value.toLowerCase();
    let count = 0;
    for (const row of rows) {
      const cells = [...row.querySelectorAll("td[data-side]")].filter((cell) => !cell.hidden);
      row.hidden = !((!figure.value || row.dataset.figure === figure.value)
        && (!verdict.value || cells.some((cell) => cell.dataset.verdict === verdict.value))
        && row.textContent.toLowerCase().includes(wanted));
      count += row.hidden ? 0 : 1;
    }
    shown.textContent = `${count} of ${rows.length} claims`;
  }

  function sort(button) {
    const head = button.closest("th"), key = button.dataset.sort;
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const value = (row) => key === "id" ? Number(row.dataset.id) : key === "figure" ? row.dataset.figure
      : Number(row.querySelector(`td[data-side="${key}"]`).dataset.order);
    const compare = (a, b) => key === "figure" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
    rows.sort((a, b) => sign * compare(value(a), value(b)) || a.dataset.id - b.dataset.id);
    body.append(...rows);
    table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  }

  [verdict, figure, words, ...sides].forEach((control) => control.addEventListener("input", filter));
  table.querySelectorAll("thead button").forEach((button) => button.addEventListener("click", () => sort(button)));
  document.querySelectorAll(".zoom").forEach((button) => button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(button.closest("figure").classList.toggle("large")));
  }));
  filter();
})();
