// Episodes token by token, the way the trainer sees them. Text comes in as text nodes only, whoever wrote it.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const WINDOW = 3000;  // so many tokens stand on the page at once
const REASONS = {
  retokenized: "the prompt repeats the sampled text with other token ids",
  template: "the chat template writes the turn otherwise than the engine sampled it",
  history_edited: "the agent cut or replaced what came before",
  tools_changed: "the conversation goes on under another system text or other tools",
  compacted: "a summary took the place of the history",
  parallel: "a second continuation of one shared history",
  new_chain: "another conversation",
};

// What turns the direction of the text behind it: one token could show all that follow in another order.
const visible = (text) => text.replace(/[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (sign) => `\\u${sign.charCodeAt(0).toString(16)}`);

function h(tag, given = {}, ...children) {
  const made = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (name.startsWith("--")) made.style.setProperty(name, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined).map((child) => child instanceof Node ? child : visible(String(child))));
  return made;
}

const figure = (value, digits = 3) => value === null || value === undefined ? "–" : Number(value).toFixed(digits);
const whole = (value) => Math.round(value).toLocaleString("en");

function versionsOf(timeline) {
  // The policy version of each sampled token, in order, by runs.
  return (timeline.policy_versions || []).map(([version, count]) => ({ version, count }));
}

function samplingText(sampling) {
  // As `ajet show` says it: T=0.7 top_p=0.9, raw logprobs.
  if (!sampling) return "sampling unknown";
  const named = Object.entries(sampling).filter(([name]) => name !== "logprobs");
  const unknown = named.filter(([, value]) => value === null).length;
  const told = named.filter(([, value]) => value !== null).map(([name, value]) => {
    const long = typeof value === "object" || String(value).startsWith("sha256:");
    return (name === "temperature" ? "T" : name) + (long ? "" : `=${value}`);
  });
  return [told.join(" "), unknown ? `${unknown} unknown` : "", `${sampling.logprobs || "unknown"} logprobs`].filter((part) => part).join(", ");
}

function treeOf(timelines) {
  // For each timeline the earlier one of its model and agent that shares the most with it, and how much that is.
  return timelines.map((one, index) => {
    let best = { parent: -1, at: 0, depth: 0 };
    for (let other = Math.max(0, index - 64); other < index; other++) {
      const two = timelines[other];
      if (two.model !== one.model || two.agent !== one.agent) continue;
      const end = Math.min(one.token_ids.length, two.token_ids.length);
      let at = 0;
      while (at < end && one.token_ids[at] === two.token_ids[at]) at++;
      if (at > best.at) best = { parent: other, at, depth: 0 };
    }
    return best;
  }).map((node, index, all) => {
    if (node.parent >= 0) node.depth = Math.min(6, all[node.parent].depth + 1);
    return node;
  });
}

function tokenNode(id, text, sampled) {
  const shown = text === undefined ? `#${id} ` : text;
  const special = /^<[|｜].*[|｜]>$/.test(shown) ? " x" : "";
  let node;
  if (sampled === null) node = h("span", { class: "c" + special, "data-t": `id ${id} · context, mask 0` });
  else {
    const about = `id ${id} · mask 1 · logprob ${sampled.logprob.toFixed(3)} (p = ${Math.exp(sampled.logprob).toFixed(3)}) · policy version ${sampled.version}`;
    node = h("span", { class: "s" + special, "--d": Math.min(1, -sampled.logprob / 4).toFixed(2), "data-t": about });
  }
  if (shown === "") node.append(h("u", {}, "∅"));
  shown.split("\n").forEach((line, index) => {
    if (index) node.append(h("u", {}, "↵"), "\n");
    node.append(visible(line));
  });
  return node;
}

function windowOf(timeline, from, texts, samplingOf) {
  // `texts` gives a model's texts of tokens by their ids.
  // `WINDOW` tokens from `from`, with a mark wherever a call begins to sample.
  const to = Math.min(timeline.token_ids.length, from + WINDOW), out = h("div", { class: "tokens" }), textOf = texts(timeline.model);
  const versions = versionsOf(timeline), begins = new Map(timeline.spans.map(([call, start]) => [start, call])), reasons = timeline.finish_reasons || [];
  let run = 0, left = versions.length ? versions[0].count : 0;
  for (let at = 0; at < to; at++) {
    let sampled = null;
    if (timeline.loss_mask[at]) {
      while (left === 0 && run + 1 < versions.length) left = versions[++run].count;
      sampled = { logprob: timeline.logprobs[at], version: versions.length ? versions[run].version : "?" };
      left--;
    }
    if (at < from) continue;
    if (begins.has(at)) {
      const name = begins.get(at), number = timeline.calls.indexOf(name) + 1;
      const about = [name, samplingText(samplingOf(name)), reasons[number - 1] ? `ended by ${reasons[number - 1]}` : ""].filter((part) => part).join(" · ");
      out.append(h("span", { class: "chip", "data-t": about }, `call ${number}` + (sampled ? ` · v${sampled.version}` : "")));
    }
    out.append(tokenNode(timeline.token_ids[at], textOf.get(timeline.token_ids[at]), sampled));
  }
  return out;
}

function treeView(timelines, nodes, chosen, from, choose) {
  const longest = Math.max(1, ...timelines.map((timeline) => timeline.token_ids.length)), grid = h("div", { class: "tree" });
  const part = (kind, start, end) => h("i", { class: kind, "--from": start / longest, "--part": (end - start) / longest });
  timelines.forEach((timeline, index) => {
    const node = nodes[index], length = timeline.token_ids.length;
    const name = `${node.depth ? "└ " : ""}${index + 1} · ${timeline.agent || timeline.model}`;
    const track = h("div", {
      class: "track", title: "show the tokens here",
      click: (event) => {
        const box = track.getBoundingClientRect();
        choose(index, Math.round((event.clientX - box.left) / box.width * longest) - WINDOW / 2);
      },
    }, part("was", 0, node.at), part("", node.at, length), ...timeline.spans.map(([, start, end]) => part("did", start, end)),
      index === chosen && length > WINDOW ? part("seen", from, Math.min(length, from + WINDOW)) : null);
    const why = timeline.broken_by, sampled = timeline.loss_mask.reduce((sum, mask) => sum + mask, 0);
    grid.append(
      h("button", { type: "button", "--depth": node.depth, "aria-pressed": String(index === chosen), click: () => choose(index, node.at ? node.at - 200 : 0) }, name),
      track,
      h("span", { class: "why", title: why ? REASONS[why] || "" : null }, why ? `${why} at token ${whole(node.at)}` : h("span", { class: "quiet" }, `${whole(length)} tokens, ${whole(sampled)} sampled`)),
    );
  });
  return grid;
}

function viewer(timelines, texts, samplingOf) {
  // The tree of timelines above the tokens of the chosen one.
  const box = h("div", { class: "viewer" }), nodes = treeOf(timelines);
  const show = (index, wanted) => {
    const timeline = timelines[index], length = timeline.token_ids.length;
    const from = Math.max(0, Math.min(wanted, length - WINDOW)), why = timeline.broken_by;
    const turn = (label, to, usable) => h("button", { type: "button", disabled: !usable, click: () => show(index, to) }, label);
    box.replaceChildren(
      treeView(timelines, nodes, index, from, show),
      why ? h("p", { class: "note" }, h("b", {}, why), `: ${REASONS[why] || "a reason of a newer proxy"}; `, `the first ${whole(nodes[index].at)} tokens are those of timeline ${nodes[index].parent + 1 || "none"}.`) : "",
      timeline.repaired_tokens ? h("p", { class: "note" }, `${whole(timeline.repaired_tokens)} tokens of prompts were replaced by those that were sampled.`) : "",
      length > WINDOW ? h("div", { class: "bar" }, turn("earlier", from - WINDOW, from > 0), turn("later", from + WINDOW, from + WINDOW < length), h("span", { class: "quiet" }, `tokens ${whole(from + 1)} to ${whole(Math.min(length, from + WINDOW))} of ${whole(length)}`)) : "",
      windowOf(timeline, from, texts, samplingOf),
    );
  };
  if (timelines.length) show(0, 0);
  else box.append(h("p", { class: "note" }, "No complete call, so no tokens."));
  return box;
}

function legend() {
  return h("ul", { class: "legend" },
    h("li", {}, h("span", { class: "s", "--d": 0 }, "12"), "sampled by the model (mask 1)"),
    h("li", {}, h("span", { class: "s", "--d": 1 }, "12"), "the same, and surprising: a low logprob"),
    h("li", {}, h("span", { class: "c" }, "Higher."), "context: prompt and environment (mask 0)"),
    h("li", {}, "point at a token for its id, logprob and policy version"));
}

function episodeCard(record, texts) {
  const timelines = (record.timelines || []).filter((timeline) => timeline.token_ids), seen = new Set();
  for (const timeline of timelines) for (const { version } of versionsOf(timeline)) seen.add(version);
  const sum = (of) => timelines.reduce((total, timeline) => total + of(timeline), 0);
  const lost = record.calls.filter((call) => !call.complete), sampling = new Map(record.calls.map((call) => [call.call, call.sampling]));
  const sampled = [...new Set(record.calls.filter((call) => call.complete).map((call) => samplingText(call.sampling)))];
  const facts = {
    task: record.task, agent: record.agent, model: record.model, state: record.state + (record.reason ? ` (${record.reason})` : ""),
    "policy version": [...seen].join(", ") || "none", calls: record.calls.length + (lost.length ? `, ${lost.length} lost or running: ${[...new Set(lost.map((call) => call.reason || "running"))].join(", ")}` : ""),
    timelines: timelines.length, tokens: `${whole(sum((one) => one.token_ids.length))}, ${whole(sum((one) => one.loss_mask.reduce((a, b) => a + b, 0)))} sampled`,
    sampling: sampled.slice(0, 3).join("; ") + (sampled.length > 3 ? `; ${sampled.length - 3} more` : ""), "identified by": record.identified_by, note: record.detail, episode: record.episode,
  };
  return h("article", { class: "card" },
    h("div", { class: "head" }, h("p", {}, h("span", { class: "quiet" }, "reward "), figure(record.reward)), h("div", { class: "meter" }, h("i", { "--share": Math.min(1, Math.max(0, record.reward || 0)) }))),
    h("dl", {}, ...Object.entries(facts).filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value))))),
    record.rewards && record.rewards.some((given, index) => index || given.note || given.agent || given.call) ? h("p", { class: "note" }, "rewards: " + record.rewards.map((given) => `${figure(given.value)}${given.agent ? ` to ${given.agent}` : ""}${given.call ? ` for ${given.call}` : ""}${given.note ? ` (${given.note})` : ""}`).join(" · ")) : null,
    viewer(timelines, texts, (call) => sampling.get(call)));
}

function tips() {
  const tip = document.getElementById("tip");
  document.addEventListener("mouseover", (event) => {
    const on = event.target.closest ? event.target.closest("[data-t]") : null;
    tip.hidden = on === null;
    if (on === null) return;
    tip.textContent = on.dataset.t;
    const box = on.getClientRects()[0] || on.getBoundingClientRect(), own = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - own.width - 8))}px`;
    tip.style.top = `${box.top > own.height + 10 ? box.top - own.height - 6 : box.bottom + 6}px`;
  });
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
}
