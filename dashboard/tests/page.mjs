// Tries the page in Chromium. On stdin: {url, nodes: [{name, pid, layers}], secret, chromium, shots, only, interactive_ms, longest_ms}.
// Run by tests/test_page.py.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import net from "node:net";
import { chromium } from "playwright-core";
import { answers } from "./answers.mjs";

const told = JSON.parse(await new Promise((done) => {
  let text = "";
  process.stdin.on("data", (part) => (text += part)).on("end", () => done(text));
}));
const axe = createRequire(import.meta.url).resolve("axe-core/axe.min.js");
const browser = await chromium.launch({ executablePath: told.chromium, args: ["--no-sandbox"] });
const foreign = [];
const complaints = [];

/** A way to the gateway that can be cut: connections end, and new ones are refused until it is mended. */
const cuttable = await new Promise((done) => {
  const { port } = new URL(told.url);
  const open = new Set();
  let isCut = false;
  const server = net.createServer((near) => {
    const far = net.connect(Number(port), "127.0.0.1");
    for (const [from, to] of [[near, far], [far, near]]) {
      open.add(from);
      from.pipe(to);
      from.on("error", () => to.destroy()).on("close", () => (open.delete(from), to.destroy()));
    }
    if (isCut) near.destroy();
  });
  const cut = (wanted) => {
    isCut = wanted;
    if (isCut) open.forEach((socket) => socket.destroy());
  };
  server.listen(0, "127.0.0.1", () => done({ url: `http://127.0.0.1:${server.address().port}`, cut, close: () => server.close() }));
});

async function open(scheme, width, height) {
  // axe is put into the page by the debugger, which the policy of the page would refuse: a second look without it is below.
  const context = await browser.newContext({ colorScheme: scheme, viewport: { width, height }, bypassCSP: true });
  return listen(await context.newPage());
}

function listen(page) {
  page.setDefaultTimeout(60000);
  page.on("request", (one) => one.url().startsWith(told.url) || one.url().startsWith(cuttable.url) || foreign.push(one.url()));
  page.on("pageerror", (error) => complaints.push(error.message));
  page.on("console", (said) => {
    if (["error", "warning"].includes(said.type()) && !/status of (401|403|409|429)/.test(said.text())) complaints.push(said.text());
  });
  return page;
}

/** Holds a node up for nine tenths of the time while `act` runs: what is over in a moment on a quiet machine lasts. */
async function slowly(act) {
  const { pid } = told.nodes.find((node) => node.name === "node-2");
  const pause = () => (process.kill(pid, "SIGSTOP"), setTimeout(() => process.kill(pid, "SIGCONT"), 180));
  pause();
  const pauses = setInterval(pause, 200);
  await act().finally(() => clearInterval(pauses));
}

async function shot(page, name) {
  if (told.shots) await page.screenshot({ path: `${told.shots}/${name}.png` });
}

/** No finding of axe, of any severity. */
async function accessible(page, where) {
  if (!(await page.evaluate(() => "axe" in window))) await page.addScriptTag({ path: axe });
  const found = await page.evaluate(async () =>
    (await axe.run(document, { resultTypes: ["violations"] })).violations.map(
      (one) => `${one.id} (${one.impact}): ${one.nodes.map((node) => `${node.target} ${node.failureSummary}`).join("; ").slice(0, 600)}`,
    ),
  );
  assert.deepEqual(found, [], `axe, ${where}`);
}

/** No finding of axe in the light and in the dark, and a picture of each. */
async function inBothColours(page, name) {
  for (const colorScheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme });
    await accessible(page, `${name}, ${colorScheme}`);
    await shot(page, `${colorScheme}-${name}`);
  }
}

const checks = {
  async "the policy of the page is kept, and nothing breaks it"() {
    const context = await browser.newContext();
    const page = listen(await context.newPage());
    const answer = await page.goto(`${told.url}/`);
    assert.match(answer.headers()["content-security-policy"], /default-src 'none'/);
    await page.waitForSelector(".nodes li");
    for (const panel of ["swarm", "add a machine", "plan", "jobs", "keys"]) await page.click(`nav >> text=/^${panel}$/i`);
    const ran = await page.evaluate(() => {
      const script = document.createElement("script");
      try {
        script.textContent = "window.ran = true";
      } catch {
        return "refused";
      }
      document.head.append(script);
      return window.ran ? "ran" : "refused";
    });
    assert.equal(ran, "refused");
    complaints.length = 0; // of what was just tried
    await context.close();
  },

  async "the page is small, and soon takes what is typed"() {
    const context = await browser.newContext();
    const page = listen(await context.newPage());
    const sizes = [];
    page.on("response", async (one) => {
      if (!new URL(one.url()).pathname.startsWith("/api")) sizes.push(one.request().sizes().then((told) => told.responseBodySize));
    });
    await page.goto(`${told.url}/`);
    await page.waitForSelector("textarea:enabled");
    const ms = await page.evaluate(() => performance.now());
    const bytes = (await Promise.all(sizes)).reduce((sum, size) => sum + size, 0);
    console.log(`interactive after ${ms.toFixed(0)} ms, ${bytes} bytes`);
    assert.ok(bytes < 60000, `${bytes} bytes are loaded`);
    assert.ok(ms < told.interactive_ms, `interactive after ${ms} ms, not ${told.interactive_ms}`);
    await context.close();
  },

  async "how much of a long prompt is read is shown"() {
    const page = await open("light", 1320, 860);
    await page.goto(`${told.url}/`);
    await page.waitForSelector(".nodes li");
    // in every frame: a selector is looked for every 500 ms, and may be there for 200
    const shown = page.waitForFunction(() => /Reading the prompt, \d+ % of \d+ tokens/.test(document.body.textContent));
    await page.fill("textarea", "Once upon a time there was a king. ".repeat(80));
    await slowly(async () => {
      await page.keyboard.press("Enter");
      await shown; // a quiet machine would have read it in 75 ms, before the first look
    });
    await page.waitForSelector(".figures");
    await page.context().close();
  },

  async "chat streams, stops, and shows where the time goes"() {
    const page = await open("light", 1320, 860);
    await page.goto(`${told.url}/`);
    await page.waitForSelector(".nodes li");
    await inBothColours(page, "empty");
    await page.keyboard.type("Once upon a time");
    await slowly(async () => {
      await page.keyboard.press("Enter");
      await page.waitForFunction(() => document.querySelectorAll("[data-token]").length > 5);
      await page.keyboard.press("Escape");
      await page.waitForSelector("text=stopped");
    });
    await page.fill("textarea", "Tell me of a king who lost his ring");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelectorAll(".figures").length >= 4);
    assert.match(await page.textContent("article:last-of-type .text"), /\w+ \w+/);
    assert.match(await page.textContent("aside"), /Held up most by/);
    assert.equal(await page.locator("aside ol li").count(), 3);
    const colours = await page.evaluate(() => new Set([...document.querySelectorAll(".token")].map((one) => getComputedStyle(one).color)).size);
    assert.ok(colours >= 1 && (await page.locator('.token[class*="hop-"]').count()) > 10);
    await page.focus('[role="slider"]');
    await page.keyboard.press("Home");
    await page.keyboard.press("ArrowRight");
    assert.match(await page.textContent(".cause"), /^Token 2/);
    assert.equal(await page.getAttribute('[role="slider"]', "aria-valuenow"), "2");
    const seventh = page.locator("article:last-of-type .token").nth(7); // line breaks between paragraphs are tokens, and not shown
    const index = Number(await seventh.getAttribute("data-token"));
    await seventh.click();
    assert.match(await page.textContent(".cause"), new RegExp(`^Token ${index + 1}:`));
    await inBothColours(page, "chat");
    await page.context().close();
  },

  async "an answer is shown without the space that its first token begins with"() {
    const page = await open("light", 1320, 860);
    await page.goto(`${told.url}/`);
    await page.waitForSelector(".nodes li");
    await page.click("summary");
    await page.fill('input[placeholder="the model\'s"]', "0");
    await page.fill('input[placeholder="no limit"]', "8");
    await page.click("summary");
    await page.fill("textarea", "Once upon a time there was");
    const asked = page.waitForResponse((one) => one.url().includes("/api/infer/stream"));
    await page.keyboard.press("Enter");
    assert.match(await (await asked).text(), /"token_text":" a"/);
    await page.waitForSelector(".figures");
    assert.match(await page.textContent(".text"), /^a great feast/);
    await page.context().close();
  },

  async "an answer goes on where a lost connection cut it"() {
    const page = await open("light", 1320, 860);
    const asked = [];
    page.on("request", (one) => one.url().includes("/api/infer/stream") && asked.push(one));
    await page.goto(`${cuttable.url}/`);
    await page.waitForSelector(".nodes li");
    await page.click("summary");
    await page.selectOption("label:has-text('Show answers') select", { label: "as they came" });
    await page.click("summary");
    await page.fill("textarea", "A long tale of the sea");
    await slowly(async () => {
      await page.keyboard.press("Enter");
      await page.waitForFunction(() => document.querySelectorAll("[data-token]").length > 10);
      cuttable.cut(true);
      await page.waitForSelector("text=Waiting for the gateway");
    });
    const had = await page.locator("[data-token]").count();
    cuttable.cut(false);
    await page.waitForSelector(".figures");
    const indices = await page.locator("[data-token]").evaluateAll((all) => all.map((one) => Number(one.dataset.token)));
    assert.ok(indices.length > had);
    assert.deepEqual(indices, indices.map((_, index) => index), "each token once, in order");
    const text = (await page.locator("[data-token]").allTextContents()).join("");
    const [first, ...again] = asked.map((one) => [one.headers()["last-event-id"], one.postDataJSON().received]);
    assert.deepEqual(first, [undefined, undefined]);
    assert.ok(again.length, "asked again");
    for (const [id, received] of again) assert.ok(id && received && text.startsWith(received), `says what it has: ${received}`);
    for (let i = complaints.length; i--; ) if (/net::ERR_/.test(complaints[i])) complaints.splice(i, 1);
    await page.context().close();
  },

  ...answers({ told, open, listen, browser, accessible, inBothColours, shot }),

  async "a plan compares the best placements without a machine and with it"() {
    const page = await open("light", 1320, 860);
    await page.goto(`${told.url}/#/plan`);
    await page.click("text=Compare");
    await page.waitForSelector(".results, .notice.bad");
    assert.equal(await page.locator(".notice.bad").allTextContents().then((said) => said.join()), "");
    assert.deepEqual(await page.locator(".placement h2").allTextContents(), ["Best without laptop", "Best with laptop"]);
    assert.equal(await page.locator(".results .big").count(), 2);
    await inBothColours(page, "plan");
    await page.click("button:has-text('Another machine')");
    assert.equal(await page.locator("fieldset").count(), 2);
    await page.context().close();
  },

  async "jobs tell of the requests that ran"() {
    const page = await open("dark", 1320, 860);
    await page.goto(`${told.url}/#/jobs`);
    await page.waitForSelector("tbody tr");
    await page.locator("td button").first().click();
    assert.match(await page.textContent(".more"), /node-0/);
    await inBothColours(page, "jobs");
    await page.context().close();
  },

  async "every panel on a small screen, in the dark, without sideways scrolling"() {
    const page = await open("dark", 390, 844);
    for (const panel of ["chat", "swarm", "add", "plan", "jobs", "keys"]) {
      await page.goto(`${told.url}/#/${panel}`);
      await page.waitForTimeout(1200);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(wide <= 0, `${panel} is ${wide} px too wide`);
      if (panel === "swarm") {
        const [tag, table] = await page.evaluate(() => [".strip ~ td .tag", ".scroll"].map((one) => document.querySelector(one).getBoundingClientRect().right));
        assert.ok(tag <= table, `a node's state ends at ${tag} px, where ${table} px are seen`);
      }
      await accessible(page, `small ${panel}`);
      await shot(page, `narrow-${panel}`);
    }
    await page.context().close();
  },

  async "every panel is reached and used by keys alone, and what has the focus shows it"() {
    const page = await open("light", 1320, 860);
    await page.goto(`${told.url}/#/swarm`);
    await page.waitForSelector(".legend");
    const focused = () =>
      page.evaluate(() => {
        const one = document.activeElement;
        const { outlineStyle, outlineWidth } = getComputedStyle(one);
        return { name: one.ariaLabel || one.textContent.trim(), shows: outlineStyle !== "none" && parseFloat(outlineWidth) >= 2 };
      });
    const tab = async (name) => {
      for (let steps = 0; steps < 30; steps++) {
        await page.keyboard.press("Tab");
        const now = await focused();
        assert.ok(now.shows, `the focus is not seen on ${now.name}`);
        if (now.name.startsWith(name)) return;
      }
      assert.fail(`Tab does not reach ${name}`);
    };
    await tab("Skip to content");
    for (const name of ["manyhands", "Chat", "Swarm", "Add a machine", "Plan", "Jobs"]) await tab(name);
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.activeElement.id === "main"); // a panel that is opened takes the focus
    await page.waitForSelector("tbody tr");
    await tab("Details of the request");
    await page.keyboard.press("Enter");
    await page.waitForSelector(".more");
    await page.goto(`${told.url}/#/plan`);
    await page.waitForSelector("text=Compare");
    await tab("Compare");
    await page.keyboard.press("Enter");
    await page.waitForSelector(".results");
    await page.context().close();
  },

  async "a node that dies is seen in the answer and in the swarm, and the text goes on"() {
    const page = await open("dark", 1320, 860);
    await page.goto(`${told.url}/#/swarm`);
    await page.waitForFunction(() => document.querySelectorAll("tbody tr").length >= 4);
    await inBothColours(page, "swarm");
    await page.click("nav >> text=Chat");
    await page.click("summary");
    await page.fill('input[placeholder="no limit"]', "500");
    await page.click("summary");
    await page.fill("textarea", "Tell me a long story of three brothers");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelectorAll("[data-token]").length > 20);
    const victim = told.nodes.find((node) => node.name === "node-1");
    process.kill(victim.pid, "SIGKILL");
    await page.waitForSelector(".repair");
    assert.match(await page.textContent(".repair"), /node-1 lost · spare-3 took layers 4–7 after/);
    const before = await page.locator("[data-token]").count();
    await page.waitForFunction((had) => document.querySelectorAll("[data-token]").length > had + 10, before);
    assert.match(await page.textContent("aside ol"), /spare-3/);
    await page.waitForSelector(".figures");
    assert.match(await page.textContent(".figures"), /1 repair/);
    await page.waitForFunction(() => {
      const [figures, composer] = [[...document.querySelectorAll(".figures")].at(-1), document.querySelector(".composer .box")];
      return figures.getBoundingClientRect().bottom <= composer.getBoundingClientRect().top; // the page followed the answer
    });
    await inBothColours(page, "repair");
    await page.click("nav >> text=Swarm");
    await page.waitForSelector("text=node-1 cannot be reached any more (layers 4–7)");
    await page.waitForSelector("text=Layers 4–7 are served by one node only");
    await page.waitForSelector("text=If spare-3 fails, tales stops until another node serves layers 4–7");
    await inBothColours(page, "loss");
    await page.context().close();
  },

  async "the owner makes and revokes a key; without one the page asks for it"() {
    const page = await open("light", 1320, 860);
    await page.goto(`${told.url}/#/keys`);
    await page.click("text=Sign in");
    await page.fill('input[type="password"]', "nonsense");
    await page.keyboard.press("Enter");
    await page.waitForSelector('dialog [role="alert"]:not(:empty)');
    await accessible(page, "sign in");
    await page.fill('input[type="password"]', told.secret);
    await page.keyboard.press("Enter");
    await page.waitForSelector("text=Make a key");
    await page.click("nav >> text=Add a machine");
    await page.waitForSelector("text=No machine can join here"); // `local` is no swarm's member
    await inBothColours(page, "add-none");
    await page.click("nav >> text=Keys");
    await page.fill('input[pattern]', "a guest");
    assert.match(await page.locator("input[pattern]:invalid").getAttribute("title"), /Letters, digits/); // the browser shows it
    await page.fill('input[pattern]', "guest");
    await page.locator('input[placeholder="no limit"]').nth(1).fill("30");
    await page.click("button:has-text('Make key')");
    const key = await page.textContent(".made code");
    assert.match(key, /^mhk_/);
    await page.waitForSelector("td:has-text('of 30')");
    await inBothColours(page, "keys");

    const guest = await open("light", 1320, 860);
    await guest.goto(`${told.url}/`);
    await guest.waitForSelector("dialog[open]");
    await guest.fill('input[type="password"]', key);
    await guest.keyboard.press("Enter");
    await guest.waitForSelector("dialog:not([open])", { state: "attached" });
    await guest.goto(`${told.url}/#/keys`);
    await guest.waitForSelector("text=For admins");
    await guest.goto(`${told.url}/#/add`);
    await guest.waitForSelector("text=No machine can join here"); // also for those whom an admin could let in elsewhere
    await guest.context().close();

    await page.click("button[aria-label='Revoke guest']");
    await page.click("button:has-text('Revoke guest')");
    await page.waitForSelector(".tag:has-text('revoked')");
    await page.context().close();
  },

  async "a link of the owner signs in once, and leaves no trace"() {
    const link = async () => {
      const answer = await fetch(`${told.url}/api/session/link`, { method: "POST", headers: { "x-manyhands-owner": told.secret } });
      return `${told.url}/${(await answer.json()).fragment}`;
    };
    const page = await open("light", 1320, 860);
    const first = await link();
    await page.goto(first);
    await page.waitForSelector("button:has-text('Admin')");
    assert.equal(new URL(page.url()).hash, "#/chat");
    assert.equal(await page.evaluate((token) => JSON.stringify({ ...sessionStorage }).includes(token), first.split("/").pop()), false);
    await page.reload();
    await page.waitForSelector("button:has-text('Admin')");
    await page.goto(`${told.url}/#/keys`);
    await page.waitForSelector("text=Make a key");

    const other = await open("dark", 390, 844);
    await other.goto(first);
    await other.waitForSelector("dialog[open] [role=alert]:has-text('has been used or is too old')");
    assert.match(await other.textContent("dialog [role=alert]"), /^This link/);
    await accessible(other, "a link that was used");
    await shot(other, "narrow-used-link");
    await other.keyboard.press("Escape");
    await other.goto(await link()); // in the same tab: only the fragment changes
    await other.waitForSelector("button:has-text('Admin')");
    await other.click("button:has-text('Admin')");
    await other.click("dialog button:has-text('Sign out')");
    await other.waitForSelector("button:has-text('Sign in')");
    await other.context().close();
    await page.context().close();
  },

  async "the reference is a plain page"() {
    const page = await open("light", 1000, 800);
    await page.goto(`${told.url}/docs`);
    assert.equal(await page.evaluate(() => document.scripts.length), 0);
    await inBothColours(page, "docs");
    await page.context().close();
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  if (!new RegExp(told.only).test(name)) continue;
  try {
    await check();
    console.log(`ok: ${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED: ${name}\n${error.stack}`);
  }
}
await browser.close();
cuttable.cut(true);
cuttable.close();
assert.deepEqual(foreign, [], "requests to other hosts");
assert.deepEqual(complaints, [], "what the console said");
if (failed) process.exit(1);
console.log("every check passed");
