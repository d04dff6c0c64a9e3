// One trajectory: its tokens coloured by version, probability or ratio, and the story of its life.

import { ask, changed, go, to, value } from "./address.js";
import { h, many, seconds, short, visible } from "./dom.js";
import { labels, note, rewardOf, speaker, strip, text, versionStyle } from "./parts.js";

const PHASES = {
  waiting: "waiting for an instance",
  sampling: "being sampled",
  acting: "its environment answers",
  scoring: "being scored",
  ready: "ready: waits for siblings or its step",
};
const STAGES = [
  ["arrived_s", "arrived"],
  ["routed_s", "first routed to an instance"],
  ["sampled_s", "sampled to its end"],
  ["rewarded_s", "scored"],
];

export async function trajectoryView(run, id) {
  const one = await ask("trajectory", { id });
  const heading = h(
    "div",
    { class: "heading" },
    h("h1", {}, `Trajectory ${id}`),
    one.damaged
      ? null
      : [
          h("a", { href: to(`/group/${one.group}`) }, `group ${one.group}`),
          one.fate === "consumed" ? h("a", { href: to(`/step/${one.step}`) }, `step ${one.step}`) : null,
        ],
  );
  const siblings = h(
    "p",
    { class: "chips" },
    h("span", { class: "quiet" }, "siblings"),
    one.siblings.map((sibling) =>
      h(
        "a",
        {
          href: to(`/trajectory/${sibling.trajectory}`, { colour: value("colour") }),
          class: "chip",
          "aria-current": sibling.trajectory === id ? "true" : null,
          title: `trajectory ${sibling.trajectory}`,
        },
        short(sibling.reward),
      ),
    ),
  );
  if (one.damaged)
    return { title: `Trajectory ${id}`, nodes: [heading, siblings, h("p", { class: "error" }, one.damaged)] };
  return {
    title: `Trajectory ${id}`,
    nodes: [
      heading,
      siblings,
      h(
        "section",
        { class: "card spaced" },
        h("div", { class: "sum" }, rewardOf(one, Math.abs(one.advantage)), labels(one, run.eta)),
        figures(one),
        one.error ? h("p", { class: "error" }, visible(one.error)) : null,
      ),
      note(one),
      h("h2", {}, "Prompt"),
      text(one.prompt, { class: "prompt tall" }),
      response(one, run),
      h("h2", {}, "Life"),
      life(one, id),
    ],
    follow: one.read_share < 1 ? async () => go(changed({}), { replace: true }) : null,
  };
}

function figures(one) {
  const shown = {
    ...one.facts,
    ...Object.fromEntries(Object.entries(one.reward_parts).map(([name, part]) => [`reward: ${name}`, part])),
  };
  for (const name of ["trajectory", "group", "step", "reward", "advantage"]) delete shown[name];
  if (one.reason === "none") delete shown.reason;
  if (one.staleness < 0) delete shown.staleness;
  if (one.v_traj < 0) delete shown.v_traj;
  return h(
    "dl",
    { class: "facts" },
    Object.entries(shown).map(([name, fact]) =>
      h("div", {}, h("dt", {}, visible(name.replaceAll("_", " "))), h("dd", {}, visible(short(fact)))),
    ),
  );
}

// -- the response ------------------------------------------------------------------------------------------------------

function response(one, run) {
  const { tokens } = one;
  const modes = [
    ["version", "policy version"],
    ["probability", "probability"],
    ...(tokens.ratio ? [["ratio", "importance ratio"]] : []),
  ];
  const mode = modes.some(([name]) => name === value("colour")) ? value("colour") : "version";
  const choices = h(
    "div",
    { class: "switch", role: "group", "aria-label": "Colour of the tokens" },
    modes.map(([name, shown]) =>
      h(
        "a",
        { href: changed({ colour: name === "version" ? "" : name }), "aria-current": name === mode ? "true" : null },
        shown,
      ),
    ),
  );
  const details = h("dl", { class: "facts details" });
  const cells = tokens.text.map((words, i) => {
    const shown = words === "" ? h("span", { class: "quiet" }, "·") : visible(words.replace(/\n/g, "↵\n"));
    const given = tokens.version[i] < 0;
    return h("span", { class: given ? "t given" : "t", "data-i": String(i), style: shade(mode, tokens, i) }, shown);
  });
  const said = { dir: "auto", tabindex: "0", "aria-label": "response, token by token" };
  const block =
    one.message_spans.length > 1
      ? h(
          "div",
          { class: `tokens conversation by-${mode}`, ...said },
          one.message_spans.map((passage) =>
            h(
              "section",
              { class: passage.sampled ? "passage" : "passage given" },
              speaker(passage, h("span", { class: "quiet" }, many(passage.stop - passage.start, "token"))),
              h("pre", { dir: "auto" }, cells.slice(passage.start, passage.stop)),
            ),
          ),
        )
      : h("pre", { class: `tokens by-${mode}`, ...said }, cells);
  const tell = (i) => {
    block.querySelector(".t.at")?.classList.remove("at");
    if (i === null)
      return details.replaceChildren(h("div", { class: "quiet" }, "Point at a token, or walk with the arrow keys."));
    cells[i].classList.add("at");
    const facts = [
      ["token", `${i + 1} of ${tokens.id.length}`],
      ["text", JSON.stringify(tokens.text[i])],
      ["id", tokens.id[i]],
      ...(tokens.version[i] < 0
        ? [["given by", whose(one.segments, i)]]
        : [
            ["version", tokens.version[i]],
            ["instance", whose(one.segments, i)],
            ["logprob", short(tokens.logprob[i])],
            ["probability", percent(Math.exp(tokens.logprob[i]))],
            ...(tokens.ratio ? [["ratio", short(tokens.ratio[i])]] : []),
          ]),
    ];
    details.replaceChildren(
      ...facts.map(([name, fact]) => h("div", {}, h("dt", {}, name), h("dd", {}, visible(String(fact))))),
    );
  };
  let at = null;
  const point = (event) => {
    const token = event.target.closest(".t");
    if (token) tell((at = Number(token.dataset.i)));
  };
  block.addEventListener("pointermove", point);
  block.addEventListener("click", point);
  block.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move || !tokens.id.length) return;
    event.preventDefault();
    tell((at = Math.min(tokens.id.length - 1, Math.max(0, (at ?? -1) + move))));
    cells[at].scrollIntoView({ block: "nearest" });
  });
  tell(null);
  return [
    h("div", { class: "heading" }, h("h2", {}, "Response"), choices),
    h("section", { class: "card" }, strip(one.segments), legend(mode, one, run), block, details),
  ];
}

function shade(mode, tokens, i) {
  if (tokens.version[i] < 0) return {};
  if (mode === "version") return versionStyle(tokens.version[i]);
  if (mode === "probability") return { "--s": Math.min(1, -tokens.logprob[i] / 3).toFixed(3) };
  if (mode !== "ratio") return {};
  // Full at a factor of e; above 1 it is likelier now than when it was sampled.
  const log = Math.log(Math.max(Number(tokens.ratio[i]), 1e-30));
  return { "--s": Math.min(1, Math.abs(log)).toFixed(3), "--h": log > 0 ? 8 : 215 };
}

function legend(mode, one, run) {
  const { logprob, ratio } = one.tokens;
  const given = one.message_spans.filter((passage) => !passage.sampled);
  const also = given.length
    ? h(
        "span",
        {},
        h("i", { class: "swatch given" }),
        `given: ${many(
          given.reduce((sum, passage) => sum + passage.stop - passage.start, 0),
          "token",
        )} in ${seconds(one.tool_s)}`,
      )
    : null;
  if (mode === "version") {
    const counts = new Map();
    for (const [version, where, count] of one.segments) {
      if (version < 0) continue;
      const known = counts.get(version) ?? { count: 0, where: new Set() };
      counts.set(version, { count: known.count + count, where: known.where.add(where) });
    }
    return h(
      "p",
      { class: "legend" },
      [...counts].map(([version, { count, where }]) =>
        h(
          "span",
          {},
          h("i", { class: "swatch", style: versionStyle(version) }),
          `version ${version}`,
          one.fate === "consumed" ? `, ${one.step - version} behind its step` : "",
          `: ${many(count, "token")} on ${[...where].join(", ")}`,
        ),
      ),
      also,
    );
  }
  if (mode === "probability") {
    const sum = logprob.reduce((a, b) => a + Number(b), 0);
    return h(
      "p",
      { class: "legend" },
      `The stronger, the less likely it was when sampled (full at 5 %). Perplexity ${short(Math.exp(-sum / Math.max(1, one.response_tokens)))}, logprob of the response ${short(sum)} nats.`,
    );
  }
  const known = ratio.filter((one) => one !== null).map(Number);
  const largest = Math.max(...known),
    smallest = Math.min(...known);
  return h(
    "p",
    { class: "legend" },
    `Red: likelier under the model of branch ${value("branch", "main")} than when it was sampled; blue: less likely; full at a factor of e. From ${short(smallest)} to ${short(largest)}.`,
  );
}

function whose(segments, i) {
  for (const [, where, count] of segments) {
    if (i < count) return where;
    i -= count;
  }
  return "";
}

const percent = (share) => `${short(100 * share)} %`;

// -- its life ----------------------------------------------------------------------------------------------------------

function life(one, id) {
  if (!one.story.length) {
    const times = STAGES.filter(([name]) => one.timings[name] > 0);
    return h(
      "section",
      { class: "card" },
      h(
        "p",
        { class: "quiet small" },
        one.read_share < 1
          ? `The journal is being read, ${Math.round(100 * one.read_share)} % so far; until then, from the store:`
          : "The run’s folder has no journal of it; from the store:",
      ),
      h(
        "ol",
        { class: "story" },
        times.map(([name, what]) => h("li", {}, h("time", {}, seconds(one.timings[name])), what)),
      ),
    );
  }
  const begin = one.story[0].at_s,
    end = one.story.at(-1).at_s,
    whole = Math.max(end - begin, 1e-9);
  const phases = one.story.slice(0, -1).map((mark, i) => ({ ...mark, lasts: one.story[i + 1].at_s - mark.at_s }));
  const sums = new Map();
  for (const { phase, lasts } of phases) if (phase) sums.set(phase, (sums.get(phase) ?? 0) + lasts);
  const reasons = h("div", {});
  return h(
    "section",
    { class: "card" },
    h(
      "div",
      { class: "phases", role: "img", "aria-label": "phases of its life" },
      phases.map(({ phase, lasts }) =>
        h("i", {
          class: `phase ${phase}`,
          style: { flex: lasts / whole },
          title: `${PHASES[phase] ?? ""}: ${seconds(lasts)}`,
        }),
      ),
    ),
    h(
      "p",
      { class: "legend" },
      [...sums].map(([phase, sum]) =>
        h("span", {}, h("i", { class: `swatch phase ${phase}` }), PHASES[phase], " ", h("b", {}, seconds(sum))),
      ),
    ),
    h(
      "ol",
      { class: "story" },
      one.story.map((mark) => h("li", {}, h("time", {}, seconds(mark.at_s - begin)), visible(mark.what))),
    ),
    h(
      "p",
      { class: "small quiet" },
      `It arrived ${seconds(begin)} after the run’s start. `,
      h(
        "a",
        {
          href: to("/lanes", { from: Math.max(0, begin - 0.2 * whole).toFixed(3), to: (end + 0.2 * whole).toFixed(3) }),
        },
        "What else happened then",
      ),
    ),
    h("button", { onclick: (event) => explain(event.target, reasons, id) }, "Why? Replay the run’s decisions"),
    reasons,
  );
}

async function explain(button, reasons, id) {
  button.disabled = true;
  reasons.replaceChildren(h("p", { class: "quiet" }, "Replaying the journal through a new coordinator …"));
  try {
    const { lines, difference } = await ask("story", { id });
    reasons.replaceChildren(
      text(lines.join("\n"), { class: "prompt" }),
      difference ? h("p", { class: "error" }, `The replay differs: ${difference}`) : "",
    );
  } catch (error) {
    reasons.replaceChildren(h("p", { class: "error" }, error.message));
  }
  button.disabled = false;
}
