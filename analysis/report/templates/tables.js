// The table of compile events: sort by a column, filter by arm, kind and words, jump to the chart and back.

function eventTable(table, form, show) {
  const rows = [...table.tBodies];
  const filter = () => {
    const wanted = new FormData(form),
      words = String(wanted.get("words") ?? "")
        .trim()
        .toLowerCase();
    let shown = 0;
    for (const row of rows) {
      row.hidden = !(
        (!wanted.get("arm") || row.dataset.arm === wanted.get("arm")) &&
        (!wanted.get("kind") || row.dataset.kind === wanted.get("kind")) &&
        (!words || row.textContent.toLowerCase().includes(words))
      );
      shown += row.hidden ? 0 : 1;
    }
    form.querySelector("output").textContent =
      shown === rows.length ? `${shown} event${shown === 1 ? "" : "s"}` : `${shown} of ${rows.length} events`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());

  for (const button of table.tHead.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th"),
        { sort, type } = button.dataset;
      const descending =
        head.getAttribute("aria-sort") === "ascending" || (!head.hasAttribute("aria-sort") && type === "number");
      for (const other of table.tHead.querySelectorAll("th")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const key = (row) => row.dataset[sort] ?? "";
      const known = rows.filter((row) => key(row) !== ""),
        unknown = rows.filter((row) => key(row) === "");
      known.sort(
        (a, b) =>
          (type === "number" ? Number(key(a)) - Number(key(b)) : key(a).localeCompare(key(b))) * (descending ? -1 : 1),
      );
      table.append(...known, ...unknown);
    });
  }
  for (const button of table.querySelectorAll("[data-show]"))
    button.addEventListener("click", () => show(Number(button.dataset.show)));
  return {
    open(index) {
      const row = rows.find((candidate) => candidate.dataset.event === String(index));
      if (!row) return;
      form.reset();
      filter();
      for (const other of rows) other.classList.remove("chosen");
      row.classList.add("chosen");
      unfold(row.querySelector("details"));
      row.scrollIntoView({ block: "center" });
    },
  };
}
