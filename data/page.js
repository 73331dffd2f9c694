// The page of nanoeuler's server. It uses the same protocol as any other program, and shows what
// an answer says about itself. Nothing is loaded from elsewhere. Text from the model is only ever
// inserted as text, so it is never parsed as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const state = { about: null, messages: [], asking: null, last: null, maps: null, chosen: 0 };

/** A new element with a tag, attributes and children. */
function make(tag, attributes = {}, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}

/** A token's text, with its blanks made visible. */
function visible(text) {
  return text.replace(/^ | $/g, "␣").replace(/\n/g, "↵\n").replace(/\t/g, "⇥") || "∅";
}

const percent = (p) => (p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : `${(100 * p).toFixed(1)} %`);

// ---------------------------------------------------------------------------------- the protocol

/** The error in a response, in words. */
async function complaint(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

/** POST `body` as JSON to `path`; the response. Throws an Error with the server's message. */
async function post(path, body, signal) {
  const response = await fetch(path, {
    method: "POST", headers: { "Content-Type": "application/json" }, signal,
    body: JSON.stringify(body),
  });
  if (!response.ok) throw new Error(await complaint(response));
  return response;
}

/** The events of a stream, one after another. A chunk of bytes may end anywhere: in a character. */
async function* eventsOf(response) {
  const decoder = new TextDecoder();
  let held = "";
  for (const reader = response.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += decoder.decode(value, { stream: true });
    const lines = held.split("\n\n");
    held = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

/** The settings that were filled in, by the protocol's names. */
function settings() {
  const said = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if ($(name).value !== "") said[name] = Number($(name).value);
  }
  const guesses = Number($("guesses").value);
  if (guesses) said.guesses = guesses;
  else if ($("form").value === "chat") Object.assign(said, { logprobs: true, top_logprobs: 5 });
  else said.logprobs = 5;
  return said;
}

/** The new text in a chunk of either format, and its tokens with their probabilities. */
function newIn(chunk) {
  const choice = chunk.choices[0];
  if (!choice) return { text: "", tokens: [] };
  const log = choice.logprobs, guessed = chunk.nanoeuler?.guessed;
  let tokens = [];
  if (log?.content) {
    tokens = log.content.map((t) => ({
      text: t.token, p: Math.exp(t.logprob),
      rivals: t.top_logprobs.map((r) => [r.token, Math.exp(r.logprob)]),
    }));
  } else if (log) {
    tokens = log.tokens.map((text, i) => ({
      text, p: Math.exp(log.token_logprobs[i]),
      rivals: Object.entries(log.top_logprobs[i]).map(([t, l]) => [t, Math.exp(l)]),
    }));
  }
  const text = choice.delta?.content ?? choice.text ?? "";
  return { text, tokens, guessed };
}

// ------------------------------------------------------------------------------ the conversation

/** Show a turn; returns where its text goes. */
function turn(kind, who, text) {
  const said = make("span", {}, text);
  const box = make("div", { class: `turn ${kind}` }, make("span", { class: "who" }, who), said);
  $("talk").append(box);
  box.scrollIntoView({ block: "nearest" });
  return said;
}

function busy(asking) {
  state.asking = asking;
  $("send").disabled = Boolean(asking);
  $("stop").disabled = !asking;
}

/** Send the text in the field, and show the answer as it comes. */
async function ask() {
  const text = $("question").value;
  if (state.asking || !text.trim()) return;
  const chat = $("form").value === "chat", asking = new AbortController();
  $("question").value = "";
  turn("user", chat ? "you" : "your text", text);
  const told = turn("assistant busy", state.about.id, "");
  const answer = { text: "", tokens: [], pieces: [], own: null };
  state.messages = chat ? [...state.messages, { role: "user", content: text }] : [];
  const system = $("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...state.messages];
  const body = { stream: true, ...settings(), ...(chat ? { messages } : { prompt: text }) };
  busy(asking);
  try {
    const path = chat ? "v1/chat/completions" : "v1/completions";
    for await (const chunk of eventsOf(await post(path, body, asking.signal))) {
      if (chunk.error) throw new Error(chunk.error.message);
      const piece = newIn(chunk);
      answer.text += piece.text;
      answer.tokens.push(...piece.tokens);
      if (piece.guessed) answer.pieces.push(piece);
      if (chunk.nanoeuler?.ids) answer.own = chunk.nanoeuler;
      told.textContent = answer.text;
    }
  } catch (error) {
    if (error.name !== "AbortError") turn("wrong", "the server", error.message);
  } finally {
    told.parentElement.classList.remove("busy");
    if (chat) keep(answer, told);
    busy(null);
    state.last = answer;
    showInside();
  }
}

/** Add the answer to the conversation; take back a question that got none. */
function keep(answer, told) {
  if (answer.text) state.messages.push({ role: "assistant", content: answer.text });
  else state.messages.pop();
  if (answer.own?.turns_left_out) {
    told.after(make("span", { class: "who" },
      `(without the oldest ${answer.own.turns_left_out} turns: they no longer fit the context)`));
  }
}

// ---------------------------------------------------------------------- inside the last answer

/** A row of tokens as buttons; a click or the arrow keys select one. */
function tokenRow(row, texts, choose) {
  const buttons = texts.map((text, i) => make(
    "button", { type: "button", "aria-pressed": "false", tabindex: i ? "-1" : "0" },
    visible(text)));
  function press(i) {
    buttons.forEach((button, j) => {
      button.setAttribute("aria-pressed", String(i === j));
      button.tabIndex = i === j ? 0 : -1;
    });
    choose(i, buttons);
  }
  buttons.forEach((button, i) => {
    button.addEventListener("click", () => press(i));
    button.addEventListener("keydown", (event) => {
      const to = i + ({ ArrowRight: 1, ArrowLeft: -1 })[event.key];
      if (!buttons[to]) return;
      event.preventDefault();
      buttons[to].focus();
      press(to);
    });
  });
  row.replaceChildren(...buttons);
  return { buttons, press };
}

function showInside() {
  showTokens(state.last);
  showGuesses(state.last);
  state.maps = null;
  if ($("attention-view").open) showAttention();
}

/** Tokens with backgrounds as strong as their probabilities; below, the selected one's rivals. */
function showTokens(answer) {
  $("rivals").replaceChildren();
  $("tokens-hint").textContent = answer.tokens.length
    ? "The stronger the color, the more probable the token. Select one, by click or with the arrow "
      + "keys, to see which other tokens were likely."
    : "This answer has no probabilities: it is empty, or it was made with guesses.";
  const { buttons } = tokenRow($("tokens"), answer.tokens.map((t) => t.text), (i) => {
    const token = answer.tokens[i];
    const rows = token.rivals.map(([text, p]) => make(
      "li", {}, make("code", {}, visible(text)), percent(p),
      make("div", { class: "bar" })));
    rows.forEach((row, j) => row.lastChild.style.setProperty("--share", token.rivals[j][1]));
    $("rivals").replaceChildren(
      make("p", {}, `“${visible(token.text)}” had a probability of ${percent(token.p)}. `
        + "The likeliest tokens were:"),
      make("ol", {}, ...rows));
  });
  buttons.forEach((b, i) => b.style.setProperty("--share", answer.tokens[i].p));
}

/** The text with accepted guesses underlined, and a table of the guesses of each head. */
function showGuesses(answer) {
  const found = answer.own?.guesses;
  $("kept").hidden = !found;
  $("guessed").replaceChildren(...(found ? answer.pieces : []).map((piece) => make(
    "span", piece.guessed.some(Boolean) ? { class: "guessed" } : {}, piece.text)));
  if (!found) return;
  $("guesses-hint").textContent = "Underlined: tokens that were guessed ahead, and accepted.";
  $("kept").caption.textContent = `${found.tokens} tokens in ${found.passes} passes: `
    + `${(found.tokens / Math.max(1, found.passes)).toFixed(2)} tokens per pass.`;
  $("kept").tBodies[0].replaceChildren(...found.made.map((made, i) => {
    const share = made ? found.kept[i] / made : 0, bar = make("div", { class: "bar" });
    bar.style.setProperty("--share", share);
    return make("tr", {}, make("th", { scope: "row" }, String(i + 1)), make("td", {}, String(made)),
      make("td", {}, String(found.kept[i])), make("td", {}, made ? percent(share) : "–", bar));
  }));
}

/** Fetch the attention maps of the selected layer, and show the selected head. */
async function showAttention() {
  const own = state.last?.own;
  if (!own) {
    $("attention-hint").textContent = "Ask something first, and let the answer come to its end.";
    return;
  }
  const ids = [...own.prompt_ids, ...own.ids], layer = Number($("layer").value);
  try {
    const found = await (await post("attention", { ids, layer })).json();
    found.bytes = Uint8Array.from(atob(found.maps), (c) => c.charCodeAt(0));
    state.maps = found;
    showHead();
  } catch (error) {
    $("attention-hint").textContent = error.message;
  }
}

/** The map of one head, and a row of tokens; those that the selected one looked at are shaded. */
function showHead() {
  const found = state.maps, n = found.size, head = Number($("head").value);
  const share = (row, column) => found.bytes[(head * n + row) * n + column] / 255;
  const canvas = $("map"), context = canvas.getContext("2d");
  canvas.width = canvas.height = n;
  const image = context.createImageData(n, n);
  const ink = getComputedStyle(document.documentElement).getPropertyValue("--ink").split(" ");
  for (let i = 0; i < n * n; i += 1) {
    const s = share(Math.floor(i / n), i % n);
    image.data.set([...ink.map(Number), Math.round(255 * s)], 4 * i);
  }
  context.putImageData(image, 0, 0);
  canvas.setAttribute("aria-label", `Attention map of head ${head}, layer ${found.layer}: `
    + `${n} by ${n} tokens, each row shows where one token looks`);
  $("attention-hint").textContent = "Each row of the map is a token, each column one "
    + "that it can look at. Select a token below to shade the tokens that it looked at.";
  const { press } = tokenRow($("looks"), found.tokens, (i, buttons) => {
    state.chosen = i;
    buttons.forEach((b, j) => b.style.setProperty("--share", j <= i ? share(i, j) : 0));
  });
  canvas.onclick = (event) => press(Math.floor(n * event.offsetY / canvas.clientHeight));
  press(Math.min(state.chosen || n - 1, n - 1));
}

// ------------------------------------------------------------------------------------ the start

function options(select, texts) {
  select.replaceChildren(...texts.map((text, i) => make("option", { value: i }, text)));
}

function anew() {
  state.asking?.abort();
  state.messages = [];
  $("talk").replaceChildren();
  $("question").focus();
}

async function start() {
  $("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  $("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") state.asking?.abort();
  });
  $("stop").addEventListener("click", () => state.asking?.abort());
  $("anew").addEventListener("click", anew);
  $("attention-view").addEventListener("toggle", () => {
    if ($("attention-view").open && !state.maps) showAttention();
  });
  $("layer").addEventListener("change", showAttention);
  $("head").addEventListener("change", () => state.maps && showHead());
  try {
    state.about = (await (await fetch("v1/models")).json()).data[0];
  } catch {
    $("model").textContent = "The server doesn't answer. Is it still running?";
    return;
  }
  const own = state.about.nanoeuler, count = own.parameters / 1e6;
  $("model").textContent = `${state.about.id}: ${count.toFixed(count < 10 ? 1 : 0)} million `
    + `parameters, a context of ${own.context} tokens. A model this small is often wrong.`;
  options($("guesses"), [...Array(own.guesses + 1)].map((_, i) => (i ? String(i) : "0 (none)")));
  options($("layer"), [...Array(own.layers)].map((_, i) => String(i)));
  options($("head"), [...Array(own.heads)].map((_, i) => String(i)));
  $("form").value = own.chat ? "chat" : "text";
}

start();
