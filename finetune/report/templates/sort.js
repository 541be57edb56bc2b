for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const free = [...body.rows].filter(row => !row.classList.contains("total"));
  const fixed = [...body.rows].filter(row => row.classList.contains("total"));
  if (free.length < 2) continue;
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    head.setAttribute("aria-sort", "none");
    const text = row => row.cells[column].textContent.trim();
    const number = row => parseFloat(text(row).replace(/[,<]/g, "").replace("\u2212", "-"));
    const isText = head.classList.contains("text");
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === (isText ? "ascending" : "descending") ? isText : !isText;
      heads.forEach(other => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sign = down ? -1 : 1;
      const known = row => isText ? text(row) !== "" : !Number.isNaN(number(row));
      const order = (a, b) => isText ? text(a).localeCompare(text(b), "en", {numeric: true}) : number(a) - number(b);
      const rows = free.filter(known).sort((a, b) => sign * order(a, b));
      body.append(...rows, ...free.filter(row => !known(row)), ...fixed);
    });
  });
}
