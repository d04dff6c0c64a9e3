// A training step's groups, or one group: the siblings' responses side by side.

import { ask, changed, to, value } from "./address.js";
import { batchCards } from "./batch.js";
import { h, many, seconds, short } from "./dom.js";
import {
  choice,
  failure,
  filter,
  labels,
  note,
  pager,
  rewardOf,
  speaker,
  strip,
  text,
  trajectoryLink,
} from "./parts.js";

const ORDERS = [
  ["trained", "as trained"],
  ["spread", "largest spread of rewards"],
  ["worst", "lowest reward"],
  ["best", "highest reward"],
  ["longest", "longest response"],
];
const SHOWN = [
  "reward",
  "groups_with_signal",
  "response_mean",
  "staleness_mean",
  "staleness_max",
  "ratio_mean",
  "ess",
  "clip_share",
  "entropy",
  "loss",
  "grad_norm",
  "tokens_trained",
  "train_s",
  "wait_s",
];

export async function stepView(run, step) {
  const tools = h(
    "div",
    { class: "tools" },
    filter("reward < 0.5 and staleness == 1"),
    choice("order", "Groups", ORDERS, "trained"),
  );
  const heading = (count) =>
    h(
      "div",
      { class: "heading" },
      h("h1", {}, `Step ${step}`),
      h("span", { class: "quiet" }, `trained version ${step} into ${step + 1}`),
      h(
        "span",
        { class: "around" },
        step > 0 ? h("a", { class: "button", href: aside(step - 1), rel: "prev" }, `‹ ${step - 1}`) : null,
        step + 1 < count ? h("a", { class: "button", href: aside(step + 1), rel: "next" }, `${step + 1} ›`) : null,
      ),
    );
  let found;
  try {
    found = await ask("groups", {
      step,
      where: value("where"),
      order: value("order", "trained"),
      page: value("page", "1"),
    });
  } catch (error) {
    return { title: `Step ${step}`, nodes: [heading(run.num_steps), tools, failure(error)] };
  }
  const figures = h(
    "dl",
    { class: "facts" },
    SHOWN.filter((name) => name in found.metrics).map((name) =>
      h(
        "div",
        {},
        h("dt", {}, name.replaceAll("_", " ").replace(/ s$/, "")),
        h("dd", {}, name.endsWith("_s") ? seconds(found.metrics[name]) : short(found.metrics[name])),
      ),
    ),
  );
  return {
    title: `Step ${step}`,
    nodes: [
      heading(found.num_steps),
      figures,
      batchCards(step),
      tools,
      pager(found, found.total === 1 ? "group" : "groups"),
      note(found),
      ...found.groups.map((group) => groupCard(group, run)),
      found.pages > 1 ? pager(found, "groups") : null,
    ].filter(Boolean),
    // The next step's link appears when that is stored.
    follow: (now) => {
      if (step + 1 === found.num_steps && now.num_steps > found.num_steps)
        document.querySelector(".heading").replaceWith(heading((found.num_steps = step + 2)));
    },
  };
}

const aside = (step) => to(`/step/${step}`, { where: value("where"), order: value("order") });

export async function groupView(run, group) {
  const other = value("other");
  const [found, against] = await Promise.all([
    ask("group", { group }),
    other ? ask("group", { group, branch: other }) : null,
  ]);
  return {
    title: `Group ${group}`,
    nodes: [
      h(
        "div",
        { class: "heading" },
        h("h1", {}, `Group ${group}`),
        other
          ? h(
              "span",
              { class: "quiet" },
              `rewards of ${value("branch", "main")}, and of ${other} below them · `,
              h("a", { href: changed({ other: "" }) }, "leave out"),
            )
          : null,
      ),
      note(found),
      ...found.groups.map((one) => groupCard(one, run, against?.groups[0], other)),
    ],
  };
}

function groupCard(group, run, against, other) {
  const readable = group.members.filter((one) => !one.damaged);
  const trained = readable.filter((one) => one.fate === "consumed");
  const rewards = trained.filter((one) => !one.error && typeof one.reward === "number").map((one) => one.reward);
  const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
  const spread = Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length);
  const widest = Math.max(...trained.map((one) => Math.abs(one.advantage)).filter(Number.isFinite), 0);
  const steps = [...new Set(trained.map((one) => one.step))];
  return h(
    "article",
    { class: "card group" },
    h(
      "header",
      {},
      h("h2", {}, h("a", { href: to(`/group/${group.group}`) }, `Group ${group.group}`)),
      location.pathname.startsWith("/group")
        ? steps.map((step) => h("a", { href: to(`/step/${step}`) }, `step ${step}`))
        : null,
      rewards.length ? h("span", { class: "quiet" }, `mean reward ${short(mean)}, spread ${short(spread)}`) : null,
      rewards.length && spread === 0 ? h("span", { class: "warn label" }, "no signal: equal rewards") : null,
      h("span", { class: "quiet" }, many(group.members.length, "response")),
    ),
    text(group.prompt, { class: "prompt" }),
    group.prompt_cut ? h("p", { class: "small quiet" }, "The whole prompt is on the page of a trajectory.") : null,
    h(
      "div",
      { class: "siblings", tabindex: "0", role: "group", "aria-label": `responses of group ${group.group}` },
      group.members.map((one) =>
        memberCard(one, run, widest, against?.members.find((they) => they.trajectory === one.trajectory), other),
      ),
    ),
  );
}

function memberCard(one, run, widest, against, other) {
  const link = h(
    "a",
    { href: to(`/trajectory/${one.trajectory}`), title: `trajectory ${one.trajectory}` },
    `${one.trajectory} ›`,
  );
  if (one.damaged)
    return h("section", { class: "sibling" }, h("header", {}, link), h("p", { class: "error" }, one.damaged));
  const dim = !one.matches || one.fate !== "consumed";
  return h(
    "section",
    { class: `sibling${dim ? " dim" : ""}${value("where") && one.matches ? " match" : ""}` },
    h("header", {}, rewardOf(one, widest), link),
    against && !against.damaged
      ? h(
          "div",
          { class: `other ${against.reward === one.reward ? "quiet" : ""}` },
          `${other}: `,
          h("b", {}, against.scored ? short(against.reward) : "not scored"),
        )
      : null,
    strip(one.segments),
    labels(one, run.eta),
    one.error ? h("p", { class: "bad small" }, one.error) : null,
    one.messages.length
      ? h(
          "div",
          { class: "response conversation", tabindex: "0", role: "group", "aria-label": "conversation" },
          one.messages.map((passage) =>
            h("div", { class: passage.sampled ? "passage" : "passage given" }, speaker(passage), text(passage.text)),
          ),
        )
      : text(one.text, { class: "response" }),
    one.cut ? h("p", { class: "small" }, trajectoryLink(one.trajectory, "the whole response")) : null,
  );
}
