// A formula that is wider than its line gets smaller, down to seven tenths. The rest scrolls.
function fit(formula) {
  formula.dataset.size ??= formula.style.fontSize; // MathJax's own, in per cent
  formula.style.fontSize = formula.dataset.size;
  const share = formula.clientWidth / formula.scrollWidth;
  if (share < 1) {
    const smaller = Math.max(0.7, 0.99 * share); // rounding to pixels takes the last hundredth
    formula.style.fontSize = `${smaller * parseFloat(formula.dataset.size)}%`;
  }
}

addEventListener("load", async () => {
  await window.MathJax?.startup?.promise;
  // The width is 0 in a folded answer, and changes when a phone is turned.
  const widths = new ResizeObserver((changes) => changes.forEach((change) => fit(change.target)));
  document.querySelectorAll("div.math mjx-container").forEach((each) => widths.observe(each));
});
