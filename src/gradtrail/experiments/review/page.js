// The page for reviewing labels. The server has the only state: each decision is in the file before the page goes on.
"use strict";

const get = (id) => document.getElementById(id);
const images = new Map(); // index of a suspect → promise of its image and neighbours
let classes = [], items = [], typed = "";
let current = -1; // the suspect that the page shows; none before the first image is there
let queue = Promise.resolve(); // what keys and buttons ask for, one after the other: nothing typed fast is lost
let faults = 0; // so far; what was asked for before one is dropped, as it was meant for an image that did not appear

async function ask(path, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  };
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer; what was saved stays. Start `gradtrail review` again, then reload this page.");
  }
  const content = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(content.error);
  return content;
}

const percent = (value) => value > 0.995 && value < 1 ? "> 99 %" : value < 0.005 && value > 0 ? "< 1 %" : `${Math.round(100 * value)} %`;

// Only the number where the class has a name too, so that a neighbour's tile stays narrow.
const short = (label) => classes[label].split(" ")[0];

function draw(canvas, width, height, pixels) {
  const bytes = atob(pixels);
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let place = 0; place < bytes.length; place++) {
    image.data.fill(bytes.charCodeAt(place), 4 * place, 4 * place + 3);
    image.data[4 * place + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

function load(index) {
  if (!images.has(index)) {
    const loading = ask(`/api/images/${index}`);
    loading.catch(() => images.delete(index)); // asked again when it is shown
    images.set(index, loading);
  }
  return images.get(index);
}

function kind(label, item) {
  return label === item.label ? "given" : label === item.proposed ? "proposed" : "";
}

function showNeighbours(content, item) {
  get("near").replaceChildren(...content.neighbours.map((near) => {
    const tile = document.createElement("li"), canvas = document.createElement("canvas"), caption = document.createElement("span");
    draw(canvas, content.width, content.height, near.pixels);
    caption.textContent = short(near.label);
    tile.title = `train ${near.id}: ${classes[near.label]}`;
    tile.className = kind(near.label, item);
    tile.append(canvas, caption);
    return tile;
  }));
  const votes = (label) => content.neighbours.filter((near) => near.label === label).length;
  const proposed = item.proposed === item.label ? "" : `, ${votes(item.proposed)} are ${short(item.proposed)}`;
  get("votes").textContent = `${votes(item.label)} of ${content.neighbours.length} are ${short(item.label)}${proposed}`;
}

async function show(index) {
  const isEnd = index >= items.length, item = items[index], content = isEnd ? null : await load(index);
  current = index;
  get("review").hidden = isEnd;
  get("finished").hidden = !isEnd;
  get("back").disabled = index === 0;
  get("next").disabled = isEnd;
  type("");
  if (isEnd) return;
  draw(get("image"), content.width, content.height, content.pixels);
  draw(get("seen"), content.width, content.height, content.pixels);
  get("size").textContent = `${content.height} × ${content.width}`;
  get("example").textContent = `${item.split} ${item.id}`;
  get("place").textContent = `${index + 1} of ${items.length}`;
  get("given").textContent = classes[item.label];
  get("proposed").textContent = classes[item.proposed];
  get("probability").textContent = percent(item.probability);
  get("wrong").textContent = percent(item.wrong);
  get("meter").value = item.wrong;
  showNeighbours(content, item);
  for (const button of get("keys").children) {
    const label = Number(button.value);
    button.className = kind(label, item);
    button.setAttribute("aria-pressed", String(item.decided && item.new === label && item.new !== item.label));
  }
  get("keep").querySelector("b").textContent = short(item.label);
  get("keep").setAttribute("aria-pressed", String(item.decided && item.new === item.label));
  get("unclear").setAttribute("aria-pressed", String(item.decided && item.new === null));
  get("note").value = item.reason;
  for (const ahead of [1, 2, 3]) if (index + ahead < items.length) load(index + ahead);
}

function showProgress(progress) {
  get("decided").textContent = `${progress.decided} of ${progress.total}`;
  get("corrected").textContent = progress.corrected;
  get("expected").textContent = progress.expected_left < 10 ? progress.expected_left.toFixed(1) : Math.round(progress.expected_left);
  get("bar").firstElementChild.style.width = `${100 * progress.decided / Math.max(progress.total, 1)}%`;
  get("bar").setAttribute("aria-valuemax", progress.total);
  get("bar").setAttribute("aria-valuenow", progress.decided);
  get("total").textContent = progress.total;
  get("found").textContent = `${progress.corrected} corrected, ${progress.unclear} cannot be told.`;
}

function say(text, fault = "") {
  get("said").textContent = text;
  get("fault").textContent = fault;
  get("fault").hidden = !fault;
}

const verdict = (item) => item.new === null ? "cannot be told"
  : item.new === item.label ? `${classes[item.label]} is right` : `${classes[item.label]} → ${classes[item.new]}`;

function nextOpen(after) {
  for (let step = 1; step <= items.length; step++) {
    const index = (after + step) % items.length;
    if (!items[index].decided) return index;
  }
  return items.length;
}

async function decide(choose) {
  if (!(current in items)) return;
  const changed = await ask("/api/decide", { index: current, new: choose(items[current]), reason: get("note").value });
  const wasDecided = items[current].decided;
  items[current] = changed.item;
  showProgress(changed.progress);
  say(`${changed.item.split} ${changed.item.id}: ${verdict(changed.item)}`);
  await show(wasDecided ? Math.min(current + 1, items.length) : nextOpen(current));
}

async function undo() {
  const changed = await ask("/api/undo", {});
  if (changed.index === null) return say("Nothing to undo");
  items[changed.index] = changed.item;
  showProgress(changed.progress);
  say(`${changed.item.split} ${changed.item.id}: undone`);
  await show(changed.index);
}

const move = (step) => {
  say("");
  return show(Math.max(0, Math.min(items.length, current + step)));
};

function type(text) {
  typed = text;
  get("typed").textContent = text ? `${text}… Enter` : "";
}

// A digit decides at once where no longer number of a class begins with it; else more digits or Enter follow.
function digit(key) {
  const text = typed + key;
  const begins = classes.map((_, label) => label).filter((label) => String(label).startsWith(text));
  if (begins.length === 1 && String(begins[0]) === text) return decide(() => begins[0]);
  type(begins.length ? text : "");
}

function enter() {
  const label = typed && Number(typed);
  if (typed && label < classes.length) return decide(() => label);
}

const keys = {
  " ": () => decide((item) => item.label),
  u: () => decide(() => null),
  z: undo,
  Backspace: () => typed ? type(typed.slice(0, -1)) : undo(),
  ArrowLeft: () => move(-1),
  ArrowRight: () => move(1),
  Enter: enter,
  Escape: () => { type(""); say(""); },
  n: () => get("note").focus(),
};

const run = (action) => {
  const before = faults;
  queue = queue.then(() => before === faults ? action() : undefined).catch((error) => {
    faults += 1;
    type("");
    say("", error.message);
  });
};

document.addEventListener("keydown", (event) => {
  if (event.target === get("note")) {
    if (event.key === "Enter" || event.key === "Escape") event.target.blur();
    return;
  }
  if (event.altKey || ((event.ctrlKey || event.metaKey) && event.key !== "z")) return;
  if (event.key === "Enter" && event.target.tagName === "BUTTON" && !typed) return; // presses the button
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const action = /^[0-9]$/.test(key) ? () => digit(key) : keys[key];
  if (!action) return;
  event.preventDefault();
  if (!event.repeat || key.startsWith("Arrow")) run(action); // a key held down decides once
});

function makeKeys() {
  const isNamed = classes.some((name, label) => name !== String(label));
  get("keys").classList.toggle("named", isNamed);
  document.querySelector(".labels").classList.toggle("named", isNamed);
  get("keys").classList.toggle("many", classes.length > 10);
  get("keys").replaceChildren(...classes.map((name, label) => {
    const button = document.createElement("button");
    button.value = label;
    button.textContent = name;
    button.addEventListener("click", () => run(() => decide(() => label)));
    return button;
  }));
}

async function start() {
  const state = await ask("/api/state");
  ({ classes, items } = state);
  get("title").textContent = `${state.title}, as ${state.reviewer}`;
  makeKeys();
  showProgress(state.progress);
  await show(nextOpen(items.length - 1));
}

get("keep").addEventListener("click", () => run(keys[" "]));
get("unclear").addEventListener("click", () => run(keys.u));
get("back").addEventListener("click", () => run(keys.ArrowLeft));
get("next").addEventListener("click", () => run(keys.ArrowRight));
get("undo").addEventListener("click", () => run(undo));
run(start);
