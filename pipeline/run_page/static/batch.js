// A step's whole batch in two pictures: each trajectory's life over time, and reward against length.

import { ask, go, to, value } from "./address.js";
import { ticks } from "./charts.js";
import { h, onWidth, seconds, short, showTip, svg } from "./dom.js";
import { choice, versionStyle } from "./parts.js";

const LEFT = 46,
  RIGHT = 10,
  TOP = 6,
  BOTTOM = 20,
  HEIGHT = 220;
const WORDS = {
  waiting: "waiting for an instance",
  sampling: "being sampled",
  acting: "waiting for their environment",
  scoring: "being scored",
  ready: "ready, waits for its step",
};
const ORDERS = [
  ["arrival", "as they arrived"],
  ["span", "longest life first"],
  ["sampling", "longest sampling first"],
  ["reward", "by reward"],
];

/** The colour of a phase of a life, or of the version that was sampled from. */
const colour = (name) =>
  typeof name !== "number"
    ? { class: `phase-fill ${name}` }
    : { class: name < 0 ? "served gone" : "served", style: versionStyle(name) };

/** The two cards, which fill themselves. */
export function batchCards(step) {
  const lives = h("section", { class: "card chart" }),
    scatter = h("section", { class: "card chart" });
  const load = async () => {
    const batch = await ask("batch", { step });
    if (batch.lives.some((life) => life.length)) drawLives(lives, batch);
    else {
      lives.replaceChildren(
        h("h3", {}, "lives of the batch"),
        h(
          "p",
          { class: "quiet small" },
          batch.read_share < 1
            ? `The journal is being read: ${Math.round(100 * batch.read_share)} % so far.`
            : "The run’s folder has no journal of this step.",
        ),
      );
      if (batch.read_share < 1 && lives.isConnected) setTimeout(load, 300);
    }
    drawScatter(scatter, batch);
  };
  load().catch((error) => lives.replaceChildren(h("p", { class: "error" }, error.message)));
  return h("div", { class: "board two" }, lives, scatter);
}

function drawLives(card, batch) {
  const span = (life) => life.at(-1)[1] - life[0][0];
  const sampling = (life) => life.reduce((sum, [a, b, phase]) => sum + (phase === "sampling" ? b - a : 0), 0);
  const keys = {
    arrival: (row) => row.life[0][0],
    span: (row) => -span(row.life),
    sampling: (row) => -sampling(row.life),
    reward: (row) => row.reward,
  };
  const rows = batch.lives
    .map((life, i) => ({
      life,
      id: batch.trajectory[i],
      reward: batch.reward[i],
      tokens: batch.response_tokens[i],
      staleness: batch.staleness[i],
    }))
    .filter((row) => row.life.length);
  const key = keys[value("lives")] ?? keys.arrival;
  rows.sort((one, two) => key(one) - key(two) || one.id - two.id);
  const begin = Math.min(...rows.map((row) => row.life[0][0])),
    end = Math.max(...rows.map((row) => row.life.at(-1)[1]));
  const total = rows.reduce((sum, row) => sum + span(row.life), 0);
  const share = (phase) =>
    Math.round(
      (100 *
        rows.reduce(
          (sum, row) => sum + row.life.reduce((part, [a, b, name]) => part + (name === phase ? b - a : 0), 0),
          0,
        )) /
        (total || 1),
    );
  const plot = h("div", { class: "plot tall" });
  card.replaceChildren(
    h("h3", {}, "lives of the batch ", choice("lives", "", ORDERS, "arrival")),
    h(
      "div",
      { class: "legend" },
      Object.entries(WORDS)
        .filter(([phase]) => phase !== "acting" || share(phase) > 0)
        .map(([phase, words]) =>
          h(
            "span",
            {},
            h("i", { class: `swatch phase ${phase}` }),
            phase === "sampling" ? "being sampled, coloured by version" : words,
            " ",
            h("b", {}, `${share(phase)} %`),
          ),
        ),
    ),
    plot,
  );
  onWidth(plot, (width) => {
    const x = (at) => LEFT + ((at - begin) / (end - begin || 1)) * (width - LEFT - RIGHT);
    const tall = (HEIGHT - TOP - BOTTOM) / rows.length;
    const paths = new Map(); // one path for all pieces of a colour: thousands of trajectories are a few elements
    rows.forEach(({ life }, i) => {
      for (const [a, b, phase, version] of life) {
        const name = phase === "sampling" ? version : phase;
        const piece = `M${x(a).toFixed(1)} ${(TOP + i * tall).toFixed(2)}H${Math.max(x(b), x(a) + 0.3).toFixed(1)}v${Math.max(0.5, tall * (tall > 4 ? 0.85 : 1)).toFixed(2)}H${x(a).toFixed(1)}z`;
        paths.set(name, (paths.get(name) ?? "") + piece);
      }
    });
    plot.replaceChildren(
      svg(
        "svg",
        { width, height: HEIGHT, role: "img", "aria-label": "lives of the batch" },
        [...paths].map(([name, d]) => svg("path", { ...colour(name), d })),
        ticks(0, end - begin, Math.max(2, width / 100)).map((at) => [
          svg("line", {
            class: "grid",
            x1: x(begin + at),
            x2: x(begin + at),
            y1: HEIGHT - BOTTOM,
            y2: HEIGHT - BOTTOM + 4,
          }),
          svg(
            "text",
            {
              class: "tick",
              x: x(begin + at),
              y: HEIGHT - 5,
              "text-anchor": x(begin + at) > width - 24 ? "end" : "middle",
            },
            seconds(at),
          ),
        ]),
        svg("text", { class: "tick", x: LEFT - 6, y: TOP + 8, "text-anchor": "end" }, String(rows.length)),
      ),
    );
    const row = (event) => rows[Math.floor((event.clientY - plot.getBoundingClientRect().top - TOP) / tall)];
    plot.onpointermove = (event) => {
      const one = row(event);
      if (!one) return showTip();
      const at =
        begin + ((event.clientX - plot.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT)) * (end - begin);
      const now = one.life.find(([a, b]) => at >= a && at <= b);
      showTip(
        event.clientX,
        event.clientY,
        `trajectory ${one.id}: reward ${short(one.reward)}, ${short(one.tokens)} tokens, staleness ${one.staleness}`,
        ...(now
          ? [`${WORDS[now[2]]}${now[3] >= 0 ? ` under version ${now[3]}` : ""}: ${seconds(now[1] - now[0])}`]
          : []),
      );
    };
    plot.onpointerleave = () => showTip();
    plot.onclick = (event) => {
      const one = row(event);
      if (one) {
        showTip();
        go(to(`/trajectory/${one.id}`));
      }
    };
  });
}

function drawScatter(card, batch) {
  const points = batch.trajectory
    .map((id, i) => ({ id, x: batch.response_tokens[i], y: batch.reward[i], cut: batch.finish[i] === "length" }))
    .filter((point) => typeof point.y === "number");
  const plot = h("div", { class: "plot tall" });
  const cut = points.filter((point) => point.cut).length;
  card.replaceChildren(
    h("h3", {}, "reward and length", h("span", { class: "hint" }, "of each response")),
    h(
      "div",
      { class: "legend" },
      h("span", { class: "key dot c1" }, "ended by itself ", h("b", {}, short(points.length - cut))),
      h("span", { class: "key dot c2" }, "cut off ", h("b", {}, short(cut))),
    ),
    plot,
  );
  if (!points.length) return;
  const places = new Map(); // responses of one reward and length are one dot, the larger the more they are
  for (const point of points) {
    const key = `${point.x} ${point.y} ${point.cut}`,
      known = places.get(key);
    places.set(key, { ...point, count: (known?.count ?? 0) + 1 });
  }
  const low = Math.min(0, ...points.map((p) => p.y)),
    high = Math.max(low + 1e-9, ...points.map((p) => p.y)),
    longest = Math.max(1, ...points.map((p) => p.x));
  onWidth(plot, (width) => {
    const x = (tokens) => LEFT + (tokens / longest) * (width - LEFT - RIGHT - 6);
    const y = (reward) => TOP + 4 + (1 - (reward - low) / (high - low)) * (HEIGHT - TOP - BOTTOM - 10);
    plot.replaceChildren(
      svg(
        "svg",
        { width, height: HEIGHT, role: "img", "aria-label": "reward and length" },
        ticks(low, high, 4).map((mark) => [
          svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) }),
          svg("text", { class: "tick", x: LEFT - 6, y: y(mark) + 3.5, "text-anchor": "end" }, short(mark)),
        ]),
        ticks(0, longest, Math.max(2, width / 90)).map((mark) =>
          svg(
            "text",
            { class: "tick", x: x(mark), y: HEIGHT - 5, "text-anchor": x(mark) > width - 24 ? "end" : "middle" },
            short(mark),
          ),
        ),
        [...places.values()].map((place) =>
          svg("circle", {
            class: `dots ${place.cut ? "c2" : "c1"}`,
            cx: x(place.x),
            cy: y(place.y),
            r: Math.min(11, 2.2 + 0.9 * Math.sqrt(place.count)),
          }),
        ),
      ),
    );
    const nearest = (event) => {
      const box = plot.getBoundingClientRect();
      const far = (p) => Math.hypot(x(p.x) - (event.clientX - box.left), y(p.y) - (event.clientY - box.top));
      const best = points.reduce((one, two) => (far(two) < far(one) ? two : one));
      return far(best) < 18 ? best : null;
    };
    plot.onpointermove = (event) => {
      const one = nearest(event);
      if (!one) return showTip();
      const same = points.filter((p) => p.x === one.x && p.y === one.y).length;
      showTip(
        event.clientX,
        event.clientY,
        `reward ${short(one.y)}, ${short(one.x)} tokens`,
        same > 1 ? `${same} responses, among them trajectory ${one.id}` : `trajectory ${one.id}`,
      );
    };
    plot.onpointerleave = () => showTip();
    plot.onclick = (event) => {
      const one = nearest(event);
      if (one) {
        showTip();
        go(to(`/trajectory/${one.id}`));
      }
    };
  });
}
