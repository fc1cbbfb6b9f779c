// Makes the page one to work with; without it everything is there to be read. No dependency, nothing is loaded.
"use strict";

const byId = (id) => document.getElementById(id);

// The gallery: filters, order, and how many there are
const gallery = byId("gallery");
const items = [...gallery.children];
const choices = ["group", "split", "label", "predicted"].map(byId);
const [group, , label, predicted] = choices;
const score = byId("score");
const least = byId("least");
let cell = null; // of the confusion matrix, that the reader came from

const valueOf = (item) => Number(item.dataset[score.value] ?? NaN);
const written = (value) => String(Number(value.toPrecision(3)));

function bounds() {
  const values = items.map(valueOf).filter(Number.isFinite).sort((a, b) => a - b);
  return (share) => values[Math.min(values.length - 1, Math.floor((share / 100) * values.length))] ?? 0;
}

function filter() {
  const bound = least.value > 0 ? bounds()(least.value) : -Infinity;
  byId("bound").textContent = least.value > 0 ? written(bound) : "any";
  const matches = (item) =>
    (!group.value || item.dataset.groups.split(" ").includes(group.value)) &&
    choices.slice(1).every((choice) => !choice.value || item.dataset[choice.id] === choice.value) &&
    !(valueOf(item) < bound) && (bound === -Infinity || Number.isFinite(valueOf(item)));
  const rank = (item) => (Number.isFinite(valueOf(item)) ? valueOf(item) : -Infinity);
  const shown = new Set(items.filter(matches));
  gallery.replaceChildren(...[...items].sort((a, b) => rank(b) - rank(a) || 0));
  for (const item of items) {
    item.hidden = !shown.has(item);
    const value = valueOf(item);
    item.querySelector(".score").textContent = Number.isFinite(value) ? written(value) : "–";
  }
  gallery.scrollTop = 0;
  byId("status").textContent = `${shown.size} of ${items.length} examples`;
}

function reset() {
  for (const choice of choices) choice.value = "";
  least.value = 0;
}

for (const choice of choices) {
  choice.addEventListener("change", () => {
    if (choice === group && group.value) score.value = group.selectedOptions[0].dataset.score;
    filter();
  });
}
score.addEventListener("change", () => { least.value = 0; filter(); });
least.addEventListener("input", filter);
byId("reset").addEventListener("click", () => { reset(); filter(); });
for (const item of items) {
  const told = [...score.options].filter(({ value }) => value in item.dataset);
  item.title = told.map(({ value, text }) => `${text} ${item.dataset[value]}`).join("\n");
}
byId("filters").hidden = false;
group.value = group.options[1]?.value ?? "";
filter();

// The confusion matrix: one tab stop, arrow keys within, and a cell shows its images
const cells = [...document.querySelectorAll(".matrix a")];
const cellAt = (row, column) => cells.find((each) => Number(each.dataset.label) === row && Number(each.dataset.predicted) === column);

function goTo(target) {
  for (const each of cells) each.tabIndex = each === target ? 0 : -1;
}

function move(from, down, right) {
  let [row, column] = [Number(from.dataset.label), Number(from.dataset.predicted)];
  const size = document.querySelectorAll(".matrix tbody tr").length;
  do {
    row += down;
    column += right;
    const target = cellAt(row, column);
    if (target) {
      goTo(target);
      target.focus();
      return;
    }
  } while (row >= 0 && row < size && column >= 0 && column < size);
}

function open(target) {
  cell = target;
  reset();
  label.value = target.dataset.label;
  predicted.value = target.dataset.predicted;
  group.value = label.value === predicted.value ? "correct" : "mistakes";
  score.value = "confidence";
  filter();
  byId("back").hidden = false;
  byId("examples").scrollIntoView();
  byId("examples-title").focus({ preventScroll: true });
}

function back() {
  byId("back").hidden = true;
  byId("overview").scrollIntoView();
  cell.focus({ preventScroll: true });
}

for (const each of cells) {
  each.addEventListener("click", (event) => { event.preventDefault(); goTo(each); open(each); });
  each.addEventListener("keydown", (event) => {
    const step = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
    if (!step) return;
    event.preventDefault();
    move(each, ...step);
  });
}
if (cells.length) goTo(cells[0]);
byId("back").addEventListener("click", (event) => { event.preventDefault(); back(); });
byId("examples").addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("back").hidden) back();
});

// Sections: a link opens the one that it leads to; the contents say which one is on the screen; paper has them open
function unfold() {
  const target = byId(location.hash.slice(1))?.querySelector(":scope > .fold");
  if (target) target.open = true;
}
addEventListener("hashchange", unfold);
for (const link of document.querySelectorAll("nav a")) link.addEventListener("click", () => setTimeout(unfold));
unfold();

// The current section is the last one that begins in the upper third of the window, or the last one at the end of the page
const links = [...document.querySelectorAll("nav a")];
let clicked = null; // stays current until the reader scrolls, as a section near the end cannot reach the top

function mark() {
  const begun = links.filter((link) => byId(link.hash.slice(1)).getBoundingClientRect().top < innerHeight / 3);
  const isEnd = scrollY + innerHeight >= document.documentElement.scrollHeight - 2;
  const current = clicked ?? (isEnd ? links.at(-1) : begun.at(-1) ?? links[0]);
  for (const link of links) {
    if (link === current) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

for (const link of links) link.addEventListener("click", () => { clicked = link; mark(); });
for (const move of ["wheel", "touchmove", "keydown", "pointerdown", "scrollend"]) addEventListener(move, () => { clicked = null; }, { passive: true });
for (const change of ["scroll", "resize"]) addEventListener(change, mark, { passive: true });
mark();

let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll(".fold:not([open])")];
  for (const each of closed) each.open = true;
});
addEventListener("afterprint", () => { for (const each of closed) each.open = false; });
