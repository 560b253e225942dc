// The conversation on this page. It lives in this tab alone: the gateway keeps no texts.

import { flushSync } from "svelte";
import { ApiError, events } from "./api.svelte";
import { layers, range, said } from "./format";
import { colourOf } from "./swarm.svelte";
import { slowestHop, type TokenTime } from "./time";
import type { Audit, Hop, HopTime, Parts, Repair, Timings } from "./types";

export interface TokenItem {
  kind: "token";
  index: number;
  text: string;
  slowest: number | null; // colours of nodes
  last: number | null;
}

export interface RepairItem {
  kind: "repair";
  text: string;
  detail: string;
}

export type Item = TokenItem | RepairItem;

export interface Answer {
  id: number;
  question: string;
  form: "conversation" | "text";
  items: Item[];
  times: TokenTime[];
  route: Hop[];
  latency: Record<string, number | null>;
  waitingFor: string; // a node that the answer waits for, with its layers
  state: "waiting" | "running" | "done" | "stopped" | "failed";
  error: string;
  began: number; // performance.now()
  lastAt: number;
  seed: number | null;
  exactness: string;
  audit: Audit | null; // null: none was made
  finish: string;
  numTokens: number;
  promptTokens: number;
  prefilled: number; // prompt tokens computed by now
  cachedTokens: number;
  repairs: number;
  timings: Timings | null;
}


export const chat = $state<{
  model: string;
  answers: Answer[];
  draft: string;
  form: "conversation" | "text";
  temperature: number | null; // null: as the model recommends
  maxTokens: number | null; // null: a conversation may use the context, a text goes on for some lines
  seed: number | null;
  colourBy: "slowest" | "last" | "none";
  isPlain: boolean; // answers are shown as they came, not as Markdown
  selected: { answer: number; index: number } | null; // a token; null: the newest
  said: string; // for screen readers
}>({
  model: "",
  answers: [],
  draft: "",
  form: "conversation",
  temperature: null,
  maxTokens: null,
  seed: null,
  colourBy: "slowest",
  isPlain: false,
  selected: null,
  said: "",
});

const TEXT_TOKENS = 256;
// How long an answer that broke off is gone on with, and how often it is tried.
const PATIENCE_MS = 30_000;
const AGAIN_MS = 1000;
// A long answer is drawn less often: so many times longer than drawing took, nothing is drawn.
const REST = 5;

let stopping: AbortController | null = null;

export function isBusy(): boolean {
  const state = chat.answers.at(-1)?.state;
  return state === "waiting" || state === "running";
}

export function textOf(answer: Answer): string {
  return answer.items.map((item) => (item.kind === "token" ? item.text : "")).join("");
}

export function stop(): void {
  stopping?.abort();
}

export function clear(): void {
  stop();
  chat.answers = [];
  chat.selected = null;
}

/** Ask the last question again, in place of an answer that failed. */
export async function retry(): Promise<void> {
  const last = chat.answers.at(-1);
  if (!last || isBusy()) return;
  chat.answers.pop();
  await ask(last.question);
}

function request(question: string): Record<string, unknown> {
  const body: Record<string, unknown> = { model: chat.model };
  if (chat.temperature !== null) body.temperature = chat.temperature;
  const most = chat.maxTokens ?? (chat.form === "text" ? TEXT_TOKENS : null);
  if (most !== null) body.max_tokens = most;
  if (chat.seed !== null) body.seed = chat.seed;
  if (chat.form === "text") return { ...body, prompt: question };
  const messages = [];
  for (const one of chat.answers) {
    if (one.state !== "done" && one.state !== "stopped") continue;
    const text = textOf(one);
    if (text) messages.push({ role: "user", content: one.question }, { role: "assistant", content: text });
  }
  return { ...body, messages: [...messages, { role: "user", content: question }] };
}

export async function ask(question: string): Promise<void> {
  const body = request(question);
  const now = performance.now();
  chat.answers.push({
    id: now,
    question,
    form: chat.form,
    items: [],
    times: [],
    route: [],
    latency: {},
    waitingFor: "",
    state: "waiting",
    error: "",
    began: now,
    lastAt: now,
    seed: null,
    exactness: "",
    audit: null,
    finish: "",
    numTokens: 0,
    promptTokens: 0,
    prefilled: 0,
    cachedTokens: 0,
    repairs: 0,
    timings: null,
  });
  const answer = chat.answers.at(-1)!;
  chat.selected = null;
  stopping = new AbortController();
  const { signal } = stopping;
  const teller = new Teller(answer);
  try {
    await follow(teller, body, signal);
  } catch (error) {
    if (signal.aborted) answer.state = "stopped";
    else {
      answer.state = "failed";
      answer.error = said(error);
    }
  }
  teller.flush();
  answer.waitingFor = "";
  chat.said = spoken(answer);
}

/** Take all events of an answer. Where the gateway is away for a while, go on with the same text where it was (docs/resume.md). */
async function follow(teller: Teller, body: Record<string, unknown>, signal: AbortSignal): Promise<void> {
  const broken = new ApiError(0, "broken", "The gateway broke off before the answer was complete.");
  let after = "";
  let heardAt = performance.now();
  while (true) {
    const received = after && teller.text; // so that what no node has any more need not be drawn again token by token
    const asked = received ? { ...body, received } : body;
    try {
      for await (const { event, data, id } of events("/api/infer/stream?diagnostics=1", asked, { signal, after })) {
        heardAt = performance.now();
        teller.take(event, data);
        after = id || after;
      }
      if (teller.isComplete) return;
      throw broken;
    } catch (error) {
      teller.flush();
      const isRefusal = error instanceof ApiError && !["broken", "unreachable"].includes(error.code);
      if (signal.aborted || isRefusal) throw error;
      if (!after || performance.now() - heardAt > PATIENCE_MS) throw broken;
      teller.wait("the gateway");
      await new Promise((done) => setTimeout(done, AGAIN_MS));
      if (signal.aborted) throw error;
    }
  }
}

function spoken(answer: Answer): string {
  if (answer.state === "failed") return `The answer failed: ${answer.error}`;
  const repairs = answer.repairs ? `, ${answer.repairs} repairs` : "";
  const text = textOf(answer).slice(0, 2000);
  return `${answer.state === "stopped" ? "Stopped" : "Answer complete"}, ${answer.numTokens} tokens${repairs}. ${text}`;
}

const NO_TIME: Parts = { queue_ms: 0, compute_ms: 0, wire_ms: 0, wait_ms: 0 };

/** Takes the events of one answer; what comes between two frames of the screen is shown at once. */
class Teller {
  private items: Item[] = [];
  private times: TokenTime[] = [];
  private frame = 0;
  private restsTo = 0; // performance.now()
  private next = 0; // the token that is awaited

  constructor(private readonly answer: Answer) {}

  get isComplete(): boolean {
    return this.answer.state === "done";
  }

  /** What has been shown of the answer. */
  get text(): string {
    return textOf(this.answer);
  }

  /** Say what the answer waits for. */
  wait(who: string): void {
    this.answer.waitingFor = who;
  }

  take(event: string, data: any): void {
    const answer = this.answer;
    if (event === "start") {
      answer.state = "running";
      answer.route = data.assignments;
      answer.seed = data.seed;
      answer.exactness = data.exactness;
      answer.promptTokens = data.prompt_tokens;
      answer.cachedTokens = data.cached_tokens;
    } else if (event === "prefill") {
      answer.promptTokens = data.total;
      answer.prefilled = data.processed;
    } else if (event === "token_delta") this.token(data.index, data.text, data.hops, data);
    else if (event === "token") {
      if (data.index >= this.next) this.token(data.index, data.token_text, [], NO_TIME);
      this.time(data.ms);
    }
    else if (event === "shard_status") this.status(data);
    else if (event === "reshard") this.repair(data);
    else if (event === "done") {
      this.flush();
      answer.timings = data.timings;
      answer.finish = data.finish_reason;
      answer.audit = data.audit;
      answer.state = "done";
    } else if (event === "error") throw new ApiError(0, data.code, data.detail);
  }

  private token(index: number, text: string, hops: HopTime[], { queue_ms, compute_ms, wire_ms, wait_ms }: Parts): void {
    if (index < this.next) return; // told before the stream was cut
    this.next = index + 1;
    const route = this.answer.route;
    const slowest = slowestHop(hops);
    const colour = (hop: Hop | undefined) => (hop ? colourOf(hop.worker_id) : null);
    this.items.push({
      kind: "token",
      index,
      text,
      slowest: colour(slowest === null ? route.at(-1) : route[slowest]),
      last: colour(route.at(-1)),
    });
    this.times.push({ index, ms: 0, parts: { queue_ms, compute_ms, wire_ms, wait_ms }, hops, route });
    this.answer.waitingFor = "";
    this.later();
  }

  private time(ms: number): void {
    const last = this.times.at(-1) ?? this.answer.times.at(-1);
    if (last) last.ms = ms;
  }

  private status(data: any): void {
    const answer = this.answer;
    for (const shard of data.shards) answer.latency[shard.host.replace("ed25519:", "")] = shard.latency_ms;
    if (data.status !== "degraded") return;
    this.flush();
    const lost = data.shards.filter((shard: any) => shard.status === "degraded");
    answer.waitingFor = lost.map((shard: any) => `${shard.name} (layers ${layers(shard.shard_id.split(":").at(-1))})`).join(" and ");
  }

  private repair(data: Repair): void {
    this.flush();
    const lost = this.answer.route.filter((hop) => !data.remaining.some((one) => one.worker_id === hop.worker_id));
    const fresh = data.remaining.filter((hop) => !this.answer.route.some((one) => one.worker_id === hop.worker_id && one.layers === hop.layers));
    const who = data.dropped_worker || lost.map((hop) => hop.name).join(", ");
    const now = fresh.map((hop) => `${hop.name} took layers ${layers(hop.layers)}`).join(", ");
    const took = data.repair_ms === null ? "" : ` after ${(data.repair_ms / 1000).toFixed(2)} s`;
    this.answer.items.push({ kind: "repair", text: who ? `${who} lost · ${now || "same nodes"}${took}` : "no other node could begin · this machine alone", detail: data.reason });
    this.answer.route = data.remaining;
    if (who) this.answer.repairs += 1;
    this.answer.waitingFor = "";
    chat.said = `Repaired: ${who} lost, ${now}`;
  }

  private later(): void {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      if (performance.now() < this.restsTo) this.later();
      else this.flush();
    });
    if (document.visibilityState !== "visible" && this.items.length > 50) this.flush();
  }

  flush(): void {
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = 0;
    if (!this.items.length) return;
    this.answer.items.push(...this.items);
    this.answer.times.push(...this.times);
    this.answer.numTokens += this.items.length;
    this.answer.lastAt = performance.now();
    this.items = [];
    this.times = [];
    const began = performance.now();
    flushSync();
    this.restsTo = performance.now() + REST * (performance.now() - began);
  }
}

/** The layers of a route, for its strip. */
export function depthOf(route: Hop[]): number {
  return Math.max(0, ...route.map((hop) => range(hop.layers)[1]));
}
