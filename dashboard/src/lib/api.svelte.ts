// Requests to this gateway, and to no other host. A key lives as long as the tab.

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

const STORE = "manyhands.key";
const LINK = "#/sign-in/"; // what a link of `manyhands page` has behind the address

/** Whether this page came from this machine: only then may the owner's secret be shown to the gateway. */
export const isHere = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);

export const access = $state({
  secret: sessionStorage.getItem(STORE) ?? "",
  isAdmin: false,
  isAsked: false, // the gateway has refused a request for want of a key
  isKnown: false, // GET /api/session has been answered
  refusal: "", // why a link did not sign in
});

let token = "";

function headersOf(secret: string): Record<string, string> {
  if (!secret) return {};
  if (secret.startsWith("mhk_") || !isHere) return { authorization: `Bearer ${secret}` };
  return { "x-manyhands-owner": secret };
}

/** Learn the page's token and what the key may do. Throws ApiError. */
export async function signIn(secret: string): Promise<void> {
  const answer = await fetch("/api/session", { headers: headersOf(secret) }).catch(() => {
    throw new ApiError(0, "unreachable", "The gateway cannot be reached. Is it still running?");
  });
  const told = await bodyOf(answer, secret);
  if (secret && !isAdminOrKey(secret, told)) throw new ApiError(401, "unauthorized", "This gateway does not know that secret.");
  token = told.token;
  access.isAdmin = told.is_admin;
  access.isKnown = true;
  access.isAsked = false;
  access.secret = secret;
  if (secret) sessionStorage.setItem(STORE, secret);
  else sessionStorage.removeItem(STORE);
}

/** The token of the link that this page was opened by, "" if it was not; it leaves the address bar and the history. */
export function takeLink(): string {
  if (!location.hash.startsWith(LINK)) return "";
  const token = location.hash.slice(LINK.length);
  history.replaceState(null, "", "#/chat");
  return token;
}

/** Sign in: by the token of a link, else with what this tab knew before. What goes wrong is said in the dialog. */
export async function begin(token: string): Promise<void> {
  try {
    if (token) return await signIn(await redeem(token));
  } catch (error) {
    access.refusal = error instanceof ApiError ? error.message : String(error);
    access.isAsked = true;
  }
  await renew().catch(() => undefined);
}

async function redeem(token: string): Promise<string> {
  const headers = { "content-type": "application/json" };
  const answer = await fetch("/api/session/redeem", { method: "POST", headers, body: JSON.stringify({ token }) }).catch(() => {
    throw new ApiError(0, "unreachable", "The gateway cannot be reached. Is it still running?");
  });
  return (await bodyOf(answer, null)).secret;
}

/** A token of the process that answers now; the owner's secret of an earlier process is forgotten. Throws ApiError. */
async function renew(): Promise<void> {
  try {
    await signIn(access.secret);
  } catch (error) {
    const isOld = error instanceof ApiError && error.status === 401 && access.secret !== "" && !access.secret.startsWith("mhk_");
    if (!isOld) throw error;
    forget();
    await signIn("");
  }
}

function isAdminOrKey(secret: string, told: { is_admin: boolean }): boolean {
  return secret.startsWith("mhk_") || told.is_admin;
}

/** Forget the secret; the one that came by a link is ended at the gateway too. */
export async function signOut(): Promise<void> {
  if (access.secret && !access.secret.startsWith("mhk_")) await call("DELETE", "/api/session").catch(() => undefined);
  forget();
  await signIn("").catch(() => undefined);
}

function forget(): void {
  sessionStorage.removeItem(STORE);
  access.secret = "";
  access.isAdmin = false;
  access.isKnown = false;
}

/** The answer to a request that showed `shown`: a refusal of what this tab shows no more asks for no key. */
async function bodyOf(answer: Response, shown: string | null): Promise<any> {
  const text = await answer.text();
  let told: any = {};
  try {
    told = JSON.parse(text);
  } catch {
    told = {};
  }
  if (answer.ok) return told;
  if (answer.status === 401 && shown === access.secret) access.isAsked = true;
  const error = told.error ?? {};
  throw new ApiError(answer.status, error.code ?? "", error.message ?? `The gateway answered ${answer.status}.`);
}

interface Wish {
  signal?: AbortSignal;
  after?: string; // the id of the last event that came
}

async function send(method: string, path: string, body?: unknown, { signal, after }: Wish = {}): Promise<Response> {
  if (method !== "GET" && !access.isKnown) await renew();
  const headers: Record<string, string> = headersOf(access.secret);
  if (after) headers["last-event-id"] = after;
  if (method !== "GET") headers["x-manyhands-token"] = token;
  if (body !== undefined) headers["content-type"] = "application/json";
  const wish: RequestInit = { method, headers };
  if (body !== undefined) wish.body = JSON.stringify(body);
  if (signal) wish.signal = signal;
  try {
    return await fetch(path, wish);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "unreachable", "The gateway cannot be reached. Is it still running?");
  }
}

/** The JSON answer. Throws ApiError with the gateway's own words. A token of an earlier process is renewed once. */
export async function call<T>(method: string, path: string, body?: unknown): Promise<T> {
  let shown = access.secret;
  let answer = await send(method, path, body);
  if (answer.status === 403 && method !== "GET") {
    await renew();
    shown = access.secret;
    answer = await send(method, path, body);
  }
  return (await bodyOf(answer, shown)) as T;
}

export interface Event {
  event: string;
  data: any;
  id: string;
}

/**
 * Server-sent events of a POST; with `after` those that follow it (docs/resume.md). Throws ApiError for a refusal, AbortError
 * where the signal ends it, another error where the connection breaks.
 */
export async function* events(path: string, body: unknown, wish: Wish): AsyncGenerator<Event> {
  let answer = await send("POST", path, body, wish);
  if (answer.status === 403) {
    await renew();
    answer = await send("POST", path, body, wish);
  }
  if (!answer.ok || !answer.body) {
    await bodyOf(answer, access.secret);
    throw new ApiError(answer.status, "", "The gateway sent no stream.");
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop()!;
      for (const block of blocks) {
        const found = parse(block);
        if (found) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}

function parse(block: string): Event | null {
  let name = "message";
  let id = "";
  const data: string[] = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("id:")) id = line.slice(3).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trim());
  }
  return data.length ? { event: name, data: JSON.parse(data.join("\n")), id } : null;
}
