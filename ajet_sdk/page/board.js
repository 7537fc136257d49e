// The daemon's page: it asks the control plane of its own origin and nobody else.

const EVERY_MS = 2000, PAGE = 50, AT_ONCE = 6;
const STATES = { open: "#60a5fa", sealed: "#a78bfa", ready: "#34d399", leased: "#fbbf24", trained: "#16a34a", recorded: "#94a3b8", discarded: "#ef4444" };

class Refused extends Error {}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem("ajet-key");
  if (key && !/^[!-~]+$/.test(key)) throw new Refused("this is no key: it has characters that a key cannot have");
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, { ...options, headers: { ...headers, ...options.headers }, credentials: "omit", cache: "no-store", referrerPolicy: "no-referrer" });
  if (answer.ok) return answer.json();
  const said = await answer.json().catch(() => ({})), message = said.error ? said.error.message : `status ${answer.status}`;
  throw answer.status === 401 || answer.status === 403 ? new Refused(message) : new Error(message);
}

const control = (path) => ask(`v1/${path}`);
const link = (episode, shown = episode) => h("a", { href: `#/e/${encodeURIComponent(episode)}`, title: episode }, shown);
const age = (seconds) => seconds < 90 ? `${Math.max(0, Math.round(seconds))} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : seconds < 129600 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} d`;

// -- text of tokens, from the engine that sampled them

const known = new Map();  // model → id → text

async function detokenize(model, tokens) {
  const said = await ask("../detokenize", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ model, tokens }) });
  if (typeof said.prompt !== "string") throw new Error("the engine's /detokenize gives no text");
  return said.prompt;
}

async function learn(model, ids, marks) {
  // Many ids in one question, kept apart by a token whose text is known; one by one where that comes out even with no such token.
  const texts = known.get(model);
  let alone = ids;
  for (const mark of marks) {
    if (!alone.length) break;
    const between = await detokenize(model, [mark]), asked = alone.filter((id) => id !== mark);
    texts.set(mark, between);
    alone = between === "" ? asked : [];
    for (let start = 0; start < asked.length && between !== ""; start += 500) {
      const some = asked.slice(start, start + 500);
      const pieces = (await detokenize(model, [mark, ...some.flatMap((id) => [id, mark])])).split(between);
      if (pieces.length === some.length + 2 && pieces[0] === "" && pieces.at(-1) === "") some.forEach((id, index) => texts.set(id, pieces[index + 1]));
      else alone.push(...some);
    }
  }
  const worker = async () => {
    for (let id = alone.pop(); id !== undefined; id = alone.pop()) texts.set(id, await detokenize(model, [id]));
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
}

async function learnAll(timelines) {
  // What can be had; a token without text is shown by its number. The last trouble there was.
  let trouble = null;
  for (const model of new Set(timelines.map((timeline) => timeline.model))) {
    if (!known.has(model)) known.set(model, new Map());
    const mine = timelines.filter((timeline) => timeline.model === model), have = known.get(model);
    const ids = [...new Set(mine.flatMap((timeline) => timeline.token_ids))].filter((id) => !have.has(id));
    const ends = mine.flatMap((timeline) => timeline.spans.map(([, , end]) => timeline.token_ids[end - 1]));
    try {
      await learn(model, ids, new Set([mine[0].token_ids[0], ends[0]]));  // most likely special: a first token, a last one
    } catch (error) {
      trouble = error;
    }
  }
  return trouble;
}

// -- pieces of the overview

function pointsOf(points, byVersion) {
  const at = new Map();
  for (const point of points) {
    const x = byVersion ? (point.policy_versions[0] + point.policy_versions[1]) / 2 : (point.from + point.to) / 2;
    const same = at.get(x) || { x, count: 0, total: 0 };
    same.count += point.episodes;
    same.total += point.mean * point.episodes;
    at.set(x, same);
  }
  return [...at.values()].sort((a, b) => a.x - b.x).map(({ x, count, total }) => ({ x, y: total / count, count }));
}

function smooth(points) {
  const reach = Math.floor(points.length / 24);
  return points.map((point, index) => {
    const near = points.slice(Math.max(0, index - reach), index + reach + 1), count = near.reduce((sum, one) => sum + one.count, 0);
    return { x: point.x, y: near.reduce((sum, one) => sum + one.y * one.count, 0) / count };
  });
}

function curve(rewards, width) {
  const versions = new Set([...rewards.train.points, ...rewards.eval.points].flatMap((point) => point.policy_versions));
  const byVersion = versions.size > 1, lines = Object.fromEntries(["train", "eval"].map((kind) => [kind, pointsOf(rewards[kind].points, byVersion)]));
  const all = [...lines.train, ...lines.eval];
  if (!all.length) return h("p", { class: "note" }, "No episode has been rewarded yet.");
  const height = 230, left = 44, right = 12, top = 10, bottom = 26;
  const span = (values) => [Math.min(...values), Math.max(...values)];
  const [x0, x1] = span(all.map((point) => point.x)); let [y0, y1] = span(all.map((point) => point.y));
  if (y0 >= 0 && y1 <= 1) [y0, y1] = [0, 1];
  else if (y0 === y1) [y0, y1] = [y0 - 1, y1 + 1];
  const X = (x) => x1 === x0 ? (left + width - right) / 2 : left + (x - x0) / (x1 - x0) * (width - left - right);
  const Y = (y) => top + (y1 - y) / (y1 - y0) * (height - top - bottom);
  const picture = h("svg:svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "mean reward" });
  for (let tick = 0; tick <= 4; tick++) {
    const y = y0 + (y1 - y0) * tick / 4;
    picture.append(h("svg:line", { class: "axis", x1: left, x2: width - right, y1: Y(y), y2: Y(y) }), h("svg:text", { x: left - 7, y: Y(y) + 4, "text-anchor": "end" }, y.toFixed(Math.abs(y1 - y0) < 10 ? 2 : 0)));
  }
  const label = (x) => byVersion ? `version ${Math.round(x)}` : new Date(x * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  picture.append(h("svg:text", { x: left, y: height - 6 }, label(x0)), h("svg:text", { x: width - right, y: height - 6, "text-anchor": "end" }, x1 === x0 ? "" : label(x1)));
  for (const kind of ["train", "eval"]) {
    for (const point of lines[kind]) picture.append(h("svg:circle", { class: `dot ${kind}`, cx: X(point.x).toFixed(1), cy: Y(point.y).toFixed(1), r: 2.6, "data-t": `${kind}: ${figure(point.y)} over ${whole(point.count)} episodes, ${label(point.x)}` }));
    const path = smooth(lines[kind]).map((point, index) => `${index ? "L" : "M"}${X(point.x).toFixed(1)} ${Y(point.y).toFixed(1)}`).join("");
    if (path) picture.append(h("svg:path", { class: kind, d: path }));
  }
  return h("div", {}, picture, h("div", { class: "key" },
    h("span", {}, h("i", { "--shade": "var(--accent)" }), `training, ${whole(rewards.train.episodes)} episodes`),
    rewards.eval.episodes ? h("span", {}, h("i", { "--shade": "var(--other)" }), `evaluation, ${whole(rewards.eval.episodes)} episodes`) : null));
}

function rows(heads, lines, empty) {
  if (!lines.length) return h("p", { class: "note" }, empty);
  const kinds = { ">": "n", "~": "free" };  // a number, or text that may take several lines
  const cell = (tag, value, index) => h(tag, { class: kinds[heads[index][0]], title: typeof value === "string" && value.length > 14 ? value : null }, value ?? "–");
  return h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, ...heads.map((name, index) => cell("th", name.replace(/^[>~]/, ""), index)))),
    h("tbody", {}, ...lines.map((line) => h("tr", {}, ...line.map((value, index) => cell("td", value, index)))))));
}

function tile(value, name, kind = null) {
  return h("div", { class: "tile" }, h("b", { class: kind }, value), h("span", {}, name));
}

function tiles(status, rates) {
  const named = Object.entries(status.models), requests = status.requests || {};
  const models = [...named.slice(0, 4), ...(status.any_model ? [[named.length ? "any other model" : "any model", status.any_model]] : [])];
  return h("div", { class: "tiles" },
    tile(status.gate.state, "gate", status.gate.state === "open" ? "good" : "wait"),
    ...models.map(([name, model]) => tile(`v${model.policy_version}`, `${name}, ${(model.upstreams || []).length} ${(model.upstreams || []).length === 1 ? "engine" : "engines"}${models.length > 1 && model.in_flight !== undefined ? `, gate ${model.gate}, ${whole(model.in_flight)} in flight, ${whole(model.waiting)} held` : ""}`, models.length > 1 && model.gate !== "open" ? "wait" : null)),
    tile(rates ? whole(rates.tokens) : "…", "tokens a second"), tile(rates ? rates.calls.toFixed(1) : "…", "calls a second"),
    tile(whole(requests.in_flight || 0), "requests in flight"), tile(whole(requests.waiting || 0), "held at the gate", requests.waiting ? "wait" : null),
    tile(`${whole(status.groups.ready)} / ${whole(status.groups.leased)}`, "groups ready / leased"), tile(whole(status.groups.waiting), "groups incomplete"));
}

function states(episodes) {
  const shown = Object.entries(STATES).filter(([state]) => episodes[state]);
  return h("section", { class: "card" }, h("h2", {}, `${whole(episodes.opened)} ${episodes.opened === 1 ? "episode" : "episodes"}`),
    h("div", { class: "states" }, ...shown.map(([state, shade]) => h("i", { "--share": episodes[state], "--shade": shade, "data-t": `${state}: ${whole(episodes[state])}` }))),
    h("div", { class: "key" }, ...shown.map(([state, shade]) => h("span", {}, h("i", { "--shade": shade }), `${state} ${whole(episodes[state])}`))));
}

function judged(traffic) {
  const words = { awaiting: "awaiting", judged: "judged", rewarded: "rewarded without", not_judged: "not judged", withdrawn: "withdrawn", lost: "lost" };
  const shown = Object.entries(words).filter(([name]) => traffic[name]), models = Object.entries(traffic.holdout || {});
  return h("section", { class: "card" }, h("h2", {}, "Judgements"),
    h("p", { class: "note" }, shown.map(([name, said]) => `${whole(traffic[name])} ${said}`).join(", ") + (traffic.awaiting ? `; the oldest awaits one for ${age(traffic.oldest_s)}.` : ".")),
    models.length ? rows(["held-out chats", ">versions", ">chats", ">mean", ""], models.flatMap(([model, spans]) => spans.slice(-5).reverse().map((span) => [
      model, [...new Set(span.policy_versions)].join("–"), whole(span.episodes), figure(span.mean), h("div", { class: "meter" }, h("i", { "--share": Math.min(1, Math.max(0, (span.mean + 1) / 2)) }))])), "") : null);
}

function broken(status) {
  const counts = Object.entries(status.drift).sort((a, b) => b[1] - a[1]), most = Math.max(1, ...counts.map(([, count]) => count));
  const lost = Object.entries(status.discarded || {}).map(([reason, count]) => `${reason} ${whole(count)}`).join(", ");
  return h("section", { class: "card" }, h("h2", {}, "Broken chains"),
    rows(["reason", "", ">timelines", "~what happened"], counts.map(([reason, count]) => [reason, h("div", { class: "meter" }, h("i", { "--share": count / most })), whole(count), REASONS[reason] || ""]), "None: every turn continued the one before."),
    lost ? h("p", { class: "note" }, `Discarded episodes: ${lost}.`) : null);
}

function board(status, seen, rates, width) {
  const now = seen.now, trouble = status.alerts || [];
  return [
    ...trouble.map((line) => h("section", { class: "card alert" }, line)),
    tiles(status, rates), states(status.episodes),
    h("div", { class: "grid" },
      h("section", { class: "card" }, h("h2", {}, "Mean reward"), curve(seen.rewards, width)),
      h("section", { class: "card" }, h("h2", {}, "Reward by task"), rows(["task", ">episodes", ">mean", ">latest", ""], seen.tasks.slice(0, 10).map((task) => [
        task.task + (task.eval ? " (eval)" : ""), whole(task.episodes), figure(task.mean), figure(task.recent_mean), h("div", { class: "meter" }, h("i", { "--share": Math.min(1, Math.max(0, task.recent_mean)) }))]), "No task has been rewarded yet."),
        seen.tasks.length > 10 ? h("p", { class: "note" }, "The ten tasks that were rewarded last.") : null),
      h("section", { class: "card" }, h("h2", {}, "Quiet agents"), rows([">quiet", "waits for", "task", "agent", ">calls", ">age"], seen.quiet.slice(0, 10).map((one) => [
        h("span", { class: one.quiet_s > one.idle_timeout / 2 ? "bad" : null }, age(one.quiet_s)), one.in_flight ? "the model" : "the agent", link(one.episode, one.task || one.episode), one.agent || "–", whole(one.calls), age(one.age_s)]), "No episode is open.")),
      seen.lanes && seen.lanes.some((lane) => lane.share || lane.lane !== "default") ? h("section", { class: "card" }, h("h2", {}, "Lanes"), rows(["lane", ">share", ">groups leased", ">lent", ">open", ">ready"], seen.lanes.slice(0, 20).map((lane) => [
        lane.model === undefined ? lane.lane : `${lane.lane} (${lane.model})`, lane.share ? figure(lane.share) : "–", whole(lane.leased), lane.owed ? `${lane.owed}` : "–", whole(lane.open), whole(lane.ready)]), "")) : null,
      status.traffic && status.traffic.sealed ? judged(status.traffic) : null,
      h("div", {}, broken(status), h("section", { class: "card" }, h("h2", {}, "Leases"), rows(["batch", "model", ">groups", ">episodes", ">runs out in"], seen.leases.map((one) => [one.batch, one.model, whole(one.groups), whole(one.episodes), age(one.lease_until - now)]), "No batch is leased."))))];
}

// -- the list of episodes

class List {
  constructor() {
    this.state = ""; this.task = ""; this.trail = [null]; this.next = null;
    this.box = h("section", { class: "card", id: "episodes" });
  }

  async load() {
    const query = new URLSearchParams({ limit: PAGE }), before = this.trail.at(-1);
    for (const [name, value] of Object.entries({ state: this.state, task: this.task, before })) if (value) query.set(name, value);
    const page = await control(`episodes?${query}`);
    this.next = page.next || null;
    this.draw(page.episodes);
  }

  go(change) {
    change();
    this.load().catch((error) => this.box.append(h("p", { class: "note bad" }, error.message)));
  }

  draw(episodes) {
    const now = Date.now() / 1000, restart = (change) => () => this.go(() => { change(); this.trail = [null]; });
    const pick = h("select", { "aria-label": "state" }, h("option", { value: "" }, "every state"), ...Object.keys(STATES).map((state) => h("option", { value: state, selected: state === this.state }, state)));
    pick.addEventListener("change", () => restart(() => { this.state = pick.value; })());
    const task = h("input", { placeholder: "one task", "aria-label": "task", value: this.task, size: 18 });
    task.addEventListener("change", () => restart(() => { this.task = task.value; })());
    this.box.replaceChildren(h("h2", {}, "Episodes"),
      h("div", { class: "bar" }, pick, task, h("button", { type: "button", disabled: this.trail.length < 2, click: () => this.go(() => this.trail.pop()) }, "newer"),
        h("button", { type: "button", disabled: !this.next, click: () => this.go(() => this.trail.push(this.next)) }, "older"), h("button", { type: "button", click: () => this.go(() => {}) }, "refresh")),
      rows(["episode", "state", ">reward", "task", "agent", ">opened"], episodes.map((one) => [
        link(one.episode), one.state + (one.reason ? ` (${one.reason})` : "") + (one.eval ? " · eval" : ""), figure(one.reward), one.task || "–", one.agent || "–", `${age(now - one.opened_at)} ago`]), "None."));
  }
}

// -- the page

class Live {
  constructor(main) {
    this.main = main; this.list = new List(); this.before = null; this.rates = null; this.turn = 0;
    this.said = h("span", { class: "quiet" });
    this.body = h("div");
    this.leave = h("button", { type: "button", hidden: true, click: () => { sessionStorage.removeItem("ajet-key"); this.route(); } }, "forget the key");
    main.replaceChildren(h("div", { class: "top" }, h("h1", {}, h("a", { href: "#/" }, "ajet")), h("span", {}, this.said, " ", this.leave)), this.body);
    addEventListener("hashchange", () => this.route());
    setInterval(() => {
      if (document.hidden) return;
      if (this.overview) this.refresh(this.turn).catch((error) => this.fail(error));
      else if (this.away) this.route();
    }, EVERY_MS);
  }

  async route() {
    const turn = ++this.turn, wanted = location.hash.match(/^#\/e\/(.+)$/);
    this.overview = null; this.away = false;
    this.leave.hidden = !sessionStorage.getItem("ajet-key");
    try {
      await (wanted ? this.episode(turn, decodeURIComponent(wanted[1])) : this.board(turn));
    } catch (error) {
      if (turn === this.turn) this.fail(error);
    }
  }

  async board(turn) {
    const overview = h("div");
    await this.refresh(turn, overview);
    await this.list.load();
    if (turn !== this.turn) return;
    this.body.replaceChildren(overview, this.list.box);
    this.overview = overview;
    await this.refresh(turn, overview);
  }

  async refresh(turn, into = this.overview) {
    const [status, seen] = await Promise.all([control("status"), control("overview")]);
    if (turn !== this.turn) return;
    const at = performance.now() / 1000, counts = { at, tokens: status.tokens.generated || 0, calls: status.calls.complete };
    if (this.before && at - this.before.at > 1) this.rates = { tokens: (counts.tokens - this.before.tokens) / (at - this.before.at), calls: Math.max(0, counts.calls - this.before.calls) / (at - this.before.at) };
    if (!this.before || at - this.before.at > 1) this.before = counts;
    const width = this.body.clientWidth, half = width > 720 ? (width - 16) / 2 : width;
    into.replaceChildren(...board(status, seen, this.rates, Math.max(240, half - 38)));
    this.said.textContent = `proxy ${status.version} · ${new Date().toLocaleTimeString()}`;
  }

  async episode(turn, name) {
    this.body.replaceChildren(h("p", { class: "note" }, `Reading ${name} …`));
    const record = await control(`episodes/${encodeURIComponent(name)}?tokens=timelines`);
    const trouble = await learnAll((record.timelines || []).filter((timeline) => timeline.token_ids));
    if (turn !== this.turn) return;
    this.body.replaceChildren(h("p", {}, h("a", { href: "#/" }, "← all episodes")), legend(),
      trouble ? h("p", { class: "note" }, `Tokens without text are shown by their ids: ${trouble.message}`) : "", episodeCard(record, (model) => known.get(model)));
  }

  fail(error) {
    if (!(error instanceof Refused)) {
      this.away = error instanceof TypeError;  // what fetch throws where nobody answers
      this.said.textContent = this.away ? `no answer, trying again: ${error.message}` : error.message;
      if (!this.overview) this.body.replaceChildren(h("p", {}, h("a", { href: "#/" }, "← all episodes")), h("section", { class: "card alert" }, error.message));
      return;
    }
    this.overview = null;
    const had = sessionStorage.getItem("ajet-key"), key = h("input", { type: "password", autocomplete: "off", size: 40, "aria-label": "admin key", required: true });
    sessionStorage.removeItem("ajet-key");
    this.leave.hidden = true;
    this.said.textContent = "";
    this.body.replaceChildren(h("section", { class: "card" }, h("h2", {}, "Enter an admin key"),
      h("form", { submit: (event) => { event.preventDefault(); sessionStorage.setItem("ajet-key", key.value.trim()); this.route(); } }, key, h("button", {}, "open")),
      had ? h("p", { class: "note bad" }, error.message) : null,
      h("p", { class: "note" }, "ajet-proxy issue-key --scope admin --ttl 28800 prints one on the proxy's machine. It stays in this tab until you close it, and goes to this proxy alone.")));
    key.focus();
  }
}
