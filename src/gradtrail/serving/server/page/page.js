"use strict";
const paper = document.getElementById("paper");
const pen = paper.getContext("2d");
const message = document.getElementById("answer");
const bars = document.getElementById("bars");
const seen = document.getElementById("seen");
const tokenForm = document.getElementById("token");
let last = null;           // previous position of the pen
let isEmpty = true;
let isUpload = false;      // the next stroke replaces an upload
let latestRequest = 0;     // only the answer to the latest request is shown
let retry = null;          // request to repeat once there is a token

function clear() {
  pen.fillStyle = "#000";
  pen.fillRect(0, 0, paper.width, paper.height);
  isEmpty = true;
  isUpload = false;
  latestRequest += 1;
  bars.replaceChildren();
  seen.hidden = true;
  say("Draw an image.");
}

function say(text, isError = false) {
  message.textContent = text;
  message.classList.toggle("error", isError);
}

function place(event) {
  const box = paper.getBoundingClientRect();
  return [(event.clientX - box.left) * paper.width / box.width, (event.clientY - box.top) * paper.height / box.height];
}

function draw(event) {
  const to = place(event);
  pen.strokeStyle = "#fff";
  pen.lineWidth = 20;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo(...(last || to));
  pen.lineTo(...to);
  pen.stroke();
  last = to;
  isEmpty = false;
}

function lift() {
  if (last === null) return;
  last = null;
  ask();
}

function ask() {
  if (!isEmpty) paper.toBlob((image) => send(image), "image/png");
}

function headers() {
  const token = sessionStorage.getItem("token");
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function send(image) {
  const number = ++latestRequest;
  try {
    const answer = await fetch("/picture", { method: "POST", body: image, headers: headers() });
    const content = await answer.json();
    if (number !== latestRequest) return;
    if (answer.status === 401) return needToken(() => send(image));
    if (!answer.ok) return say(content.error, true);
    show(content);
  } catch {
    if (number === latestRequest) say("The server does not respond.", true);
  }
}

function show(content) {
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const best = content.label;
  say(`${content.classes[best]}, with ${percent(content.probabilities[best])}`);
  bars.replaceChildren(...content.probabilities.map((share, index) => {
    const line = document.createElement("li");
    const bar = document.createElement("progress");
    bar.max = 1;
    bar.value = share;
    bar.setAttribute("aria-label", `Probability of ${content.classes[index]}`);
    const [name, value] = [content.classes[index], percent(share)].map((text) => {
      const span = document.createElement("span");
      span.textContent = text;
      return span;
    });
    line.append(name, bar, value);
    line.classList.toggle("best", index === best);
    return line;
  }));
  const canvas = seen.querySelector("canvas");
  [canvas.height, canvas.width] = [content.image.length, content.image[0].length];
  const pixels = content.image.flat().flatMap((pixel) => [...(pixel.length ? pixel : [pixel, pixel, pixel]), 255]);
  canvas.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(pixels), canvas.width), 0, 0);
  seen.hidden = false;
  document.getElementById("model").textContent = `${content.model_name}, version ${content.model_version}`;
}

function needToken(then) {
  retry = then;
  sessionStorage.removeItem("token");
  tokenForm.hidden = false;
  tokenForm.querySelector("input").focus();
  say("This server needs a token.", true);
}

async function open(file) {
  if (!file) return;
  say("Reading the image…");
  try {  // show a dropped image on the paper, too
    const image = await createImageBitmap(file);
    const scale = Math.min(paper.width / image.width, paper.height / image.height);
    const [width, height] = [image.width * scale, image.height * scale];
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, paper.width, paper.height);
    pen.drawImage(image, (paper.width - width) / 2, (paper.height - height) / 2, width, height);
    isEmpty = false;
    isUpload = true;
  } catch { /* the server says what is wrong with it */ }
  send(file);
}

paper.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  if (isUpload) clear();
  paper.setPointerCapture(event.pointerId);
  draw(event);
});
paper.addEventListener("pointermove", (event) => {
  if (last === null) return;
  for (const moved of event.getCoalescedEvents?.() ?? []) draw(moved);
  draw(event);
});
paper.addEventListener("pointerup", lift);
paper.addEventListener("pointercancel", lift);
document.getElementById("clear").addEventListener("click", () => { clear(); paper.focus(); });
document.addEventListener("keydown", (event) => {
  if (event.target.tagName !== "INPUT" && (event.key === "Escape" || event.key === "Delete")) clear();
});
const chooser = document.getElementById("file");
chooser.addEventListener("change", () => { open(chooser.files[0]); chooser.value = ""; });
chooser.parentElement.addEventListener("keydown", (event) => {
  if (event.key === "Enter" || event.key === " ") { event.preventDefault(); chooser.click(); }
});
document.addEventListener("dragover", (event) => { event.preventDefault(); paper.classList.add("over"); });
document.addEventListener("dragleave", () => paper.classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  paper.classList.remove("over");
  open(event.dataTransfer.files[0]);
});
document.addEventListener("paste", (event) => open(event.clipboardData.files[0]));
tokenForm.addEventListener("submit", (event) => {
  event.preventDefault();
  const input = tokenForm.querySelector("input");
  sessionStorage.setItem("token", input.value);
  input.value = "";
  tokenForm.hidden = true;
  say("");
  retry?.();
});
clear();
