// Watches the swarm's page while a node joins and leaves. The argument is Chromium's path; says "ready" once it is open. On stdin,
// lines: {url, began, secret} first; "joined NAME" once it was started, "left NAME" once it was stopped, "lost NAME" once it was
// killed. Answers with a line for each step. `secret`, if it is given: the owner's, whose panel to add machines is tried at the
// end. Run by tests/test_page.py and bench/first_answer.py.
import assert from "node:assert/strict";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const browser = await chromium.launch({ executablePath: process.argv[2], args: ["--no-sandbox"] });
const page = await browser.newPage();
page.setDefaultTimeout(90000);
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
console.log("ready");
const told = JSON.parse((await lines.next()).value);
const foreign = [];
page.on("request", (one) => one.url().startsWith(told.url) || foreign.push(one.url()));
try {
  await page.goto(`${told.url}/`);
  await page.fill("textarea:enabled", "Once upon a time");
  await page.keyboard.press("Enter");
  await page.waitForSelector("[data-token]");
  console.log(`token ${((Date.now() - told.began) / 1000).toFixed(2)}`);
  await page.waitForSelector(".figures");
  await page.click("nav >> text=Swarm");
  await page.waitForSelector("tbody tr");
  console.log("watching");
  for await (const line of lines) {
    const [happened, name] = line.split(" ");
    await page.waitForSelector(`li:has-text("${name} ${happened === "lost" ? "cannot be reached any more" : happened}")`);
    const row = page.locator("tbody tr", { hasText: name });
    if (happened === "joined") await row.first().waitFor();
    console.log(`seen ${happened}`);
  }
  if (told.secret) {
    await page.click("nav >> text=Add a machine");
    await page.click("main button:has-text('Sign in')");
    await page.fill('input[type="password"]', told.secret);
    await page.keyboard.press("Enter");
    await page.click("text=Show a code");
    await page.waitForSelector('.notice.bad:has-text("A code needs a node that others on this network can find")');
  }
  assert.deepEqual(foreign, [], "requests to other hosts");
  console.log("every check passed");
} finally {
  await browser.close();
}
