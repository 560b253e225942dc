// What the gateway says (docs/api.md, docs/operations.md). Fields that the page does not use are left out.

export interface Span {
  model: string;
  model_id: string;
  layers: string;
  precision: string;
  state: "serving" | "loading" | "spare";
  sessions: number;
  max_sessions: number;
  queue: number;
  layer_ms: number | null;
}

export interface SwarmNode {
  node: string;
  name: string;
  is_me: boolean;
  addresses: string[];
  memory_bytes: number;
  cores: number;
  device: string;
  path: string | null;
  rtt_ms: number | null;
  spans: Span[];
}

export interface SwarmModel {
  name: string;
  id: string;
  precision: string;
  layers: number;
  coverage: number[];
  missing: string[];
}

export interface SwarmView {
  swarm: string;
  node: string;
  sessions: number;
  nodes: SwarmNode[];
  left: string[]; // ids of nodes that said so when they left
  models: SwarmModel[];
  missing: string[];
  warnings: string[];
  complaints: string[];
}

export interface Hop {
  worker_id: string;
  name: string;
  layers: string;
}

export interface HopTime {
  queue_ms?: number;
  compute_ms?: number;
}

export interface Parts {
  queue_ms: number;
  compute_ms: number;
  wire_ms: number;
  wait_ms: number;
}

export interface Repair {
  token_index: number;
  dropped_worker: string;
  kind: string;
  reason: string;
  repair_ms: number | null;
  remaining: Hop[];
}

export interface Timings {
  queue_ms: number | null;
  open_ms: number | null;
  ttft_ms: number | null;
  total_ms: number | null;
  decode_tokens_per_s: number | null;
  per_token: Parts | null;
  hops: { name: string; node: string; queue_ms: number; compute_ms: number }[];
}

/** What an audit of an answer found: whether other nodes computed the same. */
export interface Audit {
  outcome: "passed" | "failed" | "disputed" | "impossible";
  detail: string;
}

export interface Job {
  id: string;
  model: string;
  api: string;
  key: string | null;
  status: "queued" | "running" | "done" | "cancelled" | "refused" | "failed";
  finish_reason: string | null;
  error: string | null;
  created_unix_s: number;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  exactness: string;
  hops: Hop[];
  route: Hop[];
  timings: Timings;
  repairs: { reason: string; lost: string[]; replacement: string[]; at_token: number; total_s: number }[];
}

export interface Plan {
  tokens_per_s: number;
  token_ms: number;
  ends_ms: number;
  return_ms: number;
  hops: { machine: string; layers: string; compute_ms: number; link_ms: number; needs_bytes: number }[];
}

export interface Planned {
  model: string;
  layers: number;
  precision: string;
  tokens: number;
  machines: {
    name: string;
    is_new: boolean;
    memory_bytes: number;
    layer_ms: number;
    rtt_ms: number;
    layers_that_fit: number;
  }[];
  before: Plan | null;
  after: Plan | null;
  missing: { layers: string; needs_bytes: number } | null;
  advice: string[];
}

export type QuotaName = "concurrency" | "requests_per_minute" | "tokens_per_minute" | "tokens_per_day";

export interface Key {
  name: string;
  created_unix_s: number;
  revoked_unix_s: number | null;
  is_admin: boolean;
  models: string[] | null;
  quota: Record<QuotaName, number | null>;
  use: ({ running: number } & Partial<Record<QuotaName, number>>) | null;
}

export interface Invite {
  swarm: string;
  ticket: string;
  qr: string[]; // rows of 0 and 1, with margin
  code: { code: string; seconds_left: number; tries_left: number } | null;
}
