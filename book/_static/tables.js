// In a table that is wider than its line, names may break: after a mark, and before a capital.
const PARTS = /(?<=[._:/-])(?=\w)|(?<=[a-z])(?=[A-Z])/;

function tighten(table, box) {
  if (!box.clientWidth || table.offsetWidth <= box.clientWidth) return;
  for (const name of table.querySelectorAll("code .pre:not(:has(wbr))")) {
    name.style.whiteSpace = "normal";
    const parts = name.textContent.split(PARTS);
    name.replaceChildren(...parts.flatMap((part) => [part, document.createElement("wbr")]));
  }
}

addEventListener("load", () => {
  // The width is 0 in a folded answer, and changes when a phone is turned.
  const widths = new ResizeObserver((changes) =>
    changes.forEach(({ target }) => tighten(target, target.parentElement)));
  document.querySelectorAll(".bd-article table").forEach((each) => widths.observe(each));
});
