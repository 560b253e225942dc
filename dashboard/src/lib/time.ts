// Where a token's time went, and what held it up. Pure.

import { ms } from "./format";
import type { Hop, HopTime, Parts } from "./types";

export interface TokenTime {
  index: number;
  ms: number;
  parts: Parts;
  hops: HopTime[];
  route: Hop[];
}

export interface Cause {
  what: "queue" | "compute" | "wire" | "wait";
  hop: number | null; // of the route; null: no single one
  ms: number;
}

/** The largest part: of hops each one's queue and compute, of the rest the whole. */
export function causeOf(time: TokenTime): Cause | null {
  const found: Cause[] = [
    { what: "wire", hop: null, ms: time.parts.wire_ms },
    { what: "wait", hop: null, ms: time.parts.wait_ms },
  ];
  time.hops.forEach((hop, index) => {
    found.push({ what: "queue", hop: index, ms: hop.queue_ms ?? 0 });
    found.push({ what: "compute", hop: index, ms: hop.compute_ms ?? 0 });
  });
  const most = found.reduce((a, b) => (b.ms > a.ms ? b : a));
  return most.ms > 0 ? most : null;
}

/** The hop that took longest, queue and compute together; null if none said anything. */
export function slowestHop(hops: HopTime[]): number | null {
  let best: number | null = null;
  let most = 0;
  hops.forEach((hop, index) => {
    const took = (hop.queue_ms ?? 0) + (hop.compute_ms ?? 0);
    if (took > most) [best, most] = [index, took];
  });
  return best;
}

/** In words, with the node's name. `latency`: the round trip to each node, in ms, where it is known. */
export function causeText(time: TokenTime, latency: Record<string, number | null>): string {
  const cause = causeOf(time);
  if (!cause) return "It came in one step with the token before it.";
  const hop = cause.hop === null ? undefined : time.route[cause.hop];
  const node = hop?.name ?? "a node";
  switch (cause.what) {
    case "compute":
      return `Held up most by compute on ${node}`;
    case "queue":
      return `Held up most by the queue on ${node}`;
    case "wire":
      return `Held up most by the links between the nodes${farthest(time.route, latency)}`;
    case "wait":
      return "Held up most by the gateway: drawing the token, and waiting for its reader";
  }
}

/** The node with the longest round trip, where one stands out. */
function farthest(route: Hop[], latency: Record<string, number | null>): string {
  const [far, next] = route.map((hop) => ({ name: hop.name, ms: latency[hop.worker_id] ?? 0 })).sort((a, b) => b.ms - a.ms);
  return far && far.ms >= 1 && far.ms > 1.3 * (next?.ms ?? 0) ? `; the farthest is ${far.name}, ${ms(far.ms)} away` : "";
}

/** The mean of several tokens over one route; null if there are none. */
export function meanOf(times: TokenTime[]): TokenTime | null {
  const last = times.at(-1);
  if (!last) return null;
  const same = times.filter((time) => time.route === last.route && time.hops.length === last.hops.length);
  const mean = (pick: (time: TokenTime) => number) => same.reduce((sum, time) => sum + pick(time), 0) / same.length;
  return {
    index: -1,
    ms: mean((time) => time.ms),
    parts: {
      queue_ms: mean((time) => time.parts.queue_ms),
      compute_ms: mean((time) => time.parts.compute_ms),
      wire_ms: mean((time) => time.parts.wire_ms),
      wait_ms: mean((time) => time.parts.wait_ms),
    },
    hops: last.hops.map((_, index) => ({
      queue_ms: mean((time) => time.hops[index]?.queue_ms ?? 0),
      compute_ms: mean((time) => time.hops[index]?.compute_ms ?? 0),
    })),
    route: last.route,
  };
}
