// Tries the panel "Add a machine" of a member's page. On stdin, lines: {url, chromium, secret, shots} first; "joined NAME" once a
// machine has joined by the code that was told. Answers with a line for each step. Run by tests/test_page.py.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const told = JSON.parse((await lines.next()).value);
const axe = createRequire(import.meta.url).resolve("axe-core/axe.min.js");
const browser = await chromium.launch({ executablePath: told.chromium, args: ["--no-sandbox"] });
const complaints = [];

async function open(colorScheme, width, height) {
  const context = await browser.newContext({ colorScheme, viewport: { width, height }, bypassCSP: true });
  await context.grantPermissions(["clipboard-read", "clipboard-write"]);
  const page = await context.newPage();
  page.setDefaultTimeout(90000);
  page.on("request", (one) => one.url().startsWith(told.url) || complaints.push(one.url()));
  page.on("pageerror", (error) => complaints.push(error.message));
  await page.goto(`${told.url}/#/add`);
  return page;
}

async function signIn(page) {
  await page.click("main button:has-text('Sign in')");
  await page.fill('input[type="password"]', told.secret);
  await page.keyboard.press("Enter");
  await page.waitForSelector("text=On this network: with a code");
}

async function check(page, name) {
  if (!(await page.evaluate(() => "axe" in window))) await page.addScriptTag({ path: axe });
  const found = await page.evaluate(async () =>
    (await axe.run(document, { resultTypes: ["violations"] })).violations.map((one) => `${one.id}: ${one.nodes[0].failureSummary}`),
  );
  assert.deepEqual(found, [], `axe, ${name}`);
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  assert.ok(wide <= 0, `${name} is ${wide} px too wide`);
  if (told.shots) await page.screenshot({ path: `${told.shots}/${name}.png`, fullPage: true });
}

async function invitation() {
  return (await fetch(`${told.url}/api/invite`, { headers: { "x-manyhands-owner": told.secret } })).json();
}

try {
  const page = await open("light", 1320, 860);
  await page.waitForSelector("text=For admins");
  await check(page, "add-no-admin");
  await signIn(page);
  await check(page, "add-no-code");
  await page.click("text=Show a code");
  const code = await page.textContent(".signs");
  assert.match(code, /^[0-9A-Z]{3}-[0-9A-Z]{3}$/);
  assert.equal(await page.textContent("p[role=status].hidden >> nth=-1"), `The code is ${[...code.replace("-", "")].join(" ")}`);
  await page.waitForSelector("text=/10 minutes left, 3 wrong tries allowed/");
  await page.click("button:has-text('Copy the code')");
  await page.waitForSelector("button:has-text('Copied')");
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), code);
  await check(page, "add-code");
  const alone = await invitation();
  console.log(`code ${code}`);

  const [, name] = (await lines.next()).value.split(" ");
  await page.waitForSelector(`.notice.good:has-text("${name} joined")`);
  await check(page, "add-joined");
  await page.click("text=New code");
  await page.waitForFunction((old) => document.querySelector(".signs")?.textContent !== old, code);
  await page.waitForSelector("button:enabled:has-text('End it now')"); // the list that is read meanwhile may show the code sooner
  await page.focus("text=End it now");
  await page.keyboard.press("Enter");
  await page.waitForSelector("text=No code is shown. A code is good for");

  let invite = await invitation();
  while (invite.ticket === alone.ticket) {
    await page.waitForTimeout(100); // until the ticket has the address of the machine that joined too
    invite = await invitation();
  }
  assert.equal((await page.content()).includes(invite.ticket), false, "the ticket is not in the page before it is asked for");
  await page.evaluate(() => Object.defineProperty(navigator, "clipboard", { value: undefined })); // as on plain HTTP from elsewhere
  await page.evaluate(() => document.addEventListener("copy", () => (window.copied = document.activeElement.value)));
  await page.focus("text=Show the ticket and its QR code");
  await page.keyboard.press("Enter");
  await page.waitForSelector(`section[aria-labelledby=by-ticket] code:has-text("${invite.ticket}")`); // the page asks each 3 s
  await page.click("button:has-text('Copy the command with the ticket')");
  await page.waitForSelector("button:has-text('Copied')");
  assert.equal(await page.evaluate(() => window.copied), `manyhands join ${invite.ticket}`);
  await page.waitForSelector("svg[role=img]");
  const rows = await page.evaluate((size) => {
    const path = document.querySelector("svg[role=img] path");
    const numbers = [...Array(size).keys()];
    return numbers.map((y) => numbers.map((x) => Number(path.isPointInFill(new DOMPoint(x + 0.5, y + 0.5)))).join(""));
  }, invite.qr.length);
  assert.deepEqual(rows, invite.qr, "the modules that are drawn");
  assert.equal((await page.textContent("section[aria-labelledby=by-ticket] code")).trim(), `manyhands join ${invite.ticket}`);
  await check(page, "add-ticket");

  const small = await open("dark", 390, 844);
  await signIn(small);
  await small.click("text=Show a code");
  await small.waitForSelector(".signs");
  await small.click("text=Show the ticket and its QR code");
  await check(small, "narrow-add-ticket");
  assert.deepEqual(complaints, []);
  console.log("every check passed");
} finally {
  await browser.close();
  process.stdin.destroy(); // else it is waited for
}
