// The swarm as GET /api/swarm tells it, once a second while the page is seen, and what changed between two looks.

import { ApiError, call } from "./api.svelte";
import { layers, said } from "./format";
import type { SwarmNode, SwarmView } from "./types";

const PERIOD_MS = 1000;
const MAX_NEWS = 60;
const NUM_COLOURS = 8;

export interface News {
  at: number;
  kind: "joined" | "left" | "moved" | "gap" | "whole";
  text: string;
}

export const swarm = $state<{ view: SwarmView | null; error: string; news: News[]; since: number }>({
  view: null,
  error: "",
  news: [],
  since: Date.now(),
});

const colours = new Map<string, number>();

/** The colour of a node, 0 to 7: the same as long as the page is open. */
export function colourOf(node: string): number {
  let found = colours.get(node);
  if (found === undefined) {
    found = colours.size % NUM_COLOURS;
    colours.set(node, found);
  }
  return found;
}

export function nameOf(node: string): string {
  return swarm.view?.nodes.find((one) => one.node === node)?.name ?? node.slice(0, 8);
}

/** The round trip to a node in ms, as it is now; null if it is not known. */
export function latencyOf(node: string): number | null {
  return swarm.view?.nodes.find((one) => one.node === node)?.rtt_ms ?? null;
}

/** Look at the swarm until the signal ends it. */
export async function watch(signal: AbortSignal): Promise<void> {
  while (!signal.aborted) {
    if (document.visibilityState === "visible") await look();
    await new Promise((done) => setTimeout(done, PERIOD_MS));
  }
}

async function look(): Promise<void> {
  try {
    const view = await call<SwarmView>("GET", "/api/swarm");
    for (const node of inOrder(view.nodes)) colourOf(node.node);
    if (swarm.view) tell(changes(swarm.view, view));
    swarm.view = view;
    swarm.error = "";
  } catch (error) {
    if (!(error instanceof ApiError && error.status === 401)) swarm.error = said(error);
  }
}

function tell(news: Omit<News, "at">[]): void {
  const at = Date.now();
  swarm.news = [...news.map((one) => ({ at, ...one })), ...swarm.news].slice(0, MAX_NEWS);
}

/** By the first layer that they hold; those without layers last. */
export function inOrder(nodes: SwarmNode[]): SwarmNode[] {
  const first = (node: SwarmNode) => Math.min(...node.spans.map((span) => startOf(span)), 1e9);
  return [...nodes].sort((a, b) => first(a) - first(b) || a.name.localeCompare(b.name));
}

function startOf(span: { layers: string; state: string }): number {
  return Number.parseInt(span.layers) + (span.state === "spare" ? 1e6 : 0);
}

function held(node: SwarmNode): string {
  return node.spans
    .filter((span) => span.state !== "loading")
    .map((span) => layers(span.layers))
    .sort()
    .join(", ");
}

/** What to tell of the way from one view to the next. Pure. */
export function changes(before: SwarmView, after: SwarmView): Omit<News, "at">[] {
  const old = new Map(before.nodes.map((node) => [node.node, node]));
  const now = new Map(after.nodes.map((node) => [node.node, node]));
  const news: Omit<News, "at">[] = [];
  for (const [id, node] of old) {
    if (now.has(id)) continue;
    const how = after.left.includes(id) ? "left" : "cannot be reached any more";
    news.push({ kind: "left", text: `${node.name} ${how}${held(node) ? ` (layers ${held(node)})` : ""}` });
  }
  for (const [id, node] of now) {
    const known = old.get(id);
    if (!known) news.push({ kind: "joined", text: `${node.name} joined${held(node) ? ` with layers ${held(node)}` : ""}` });
    else if (held(node) !== held(known) && held(node)) {
      news.push({ kind: "moved", text: `${node.name} now serves layers ${held(node)}` });
    }
  }
  for (const model of after.models) {
    const was = before.models.find((one) => one.name === model.name && one.precision === model.precision);
    if (!was || was.missing.join() === model.missing.join()) continue;
    if (model.missing.length) {
      news.push({ kind: "gap", text: `${model.name}: no node serves layers ${model.missing.map(layers).join(" and ")}` });
    } else news.push({ kind: "whole", text: `${model.name}: every layer is served` });
  }
  return news;
}
