// Answers as the page shows them: what a model could write, sent by a stream in place of the gateway's. Checks of tests/page.mjs.
import assert from "node:assert/strict";

const SHOWN = `# Bread

A *plain* loaf takes **four** things, ~~five~~ and \`salt\`; see [the mill](https://example.org/mill "title") or <https://example.org/a>,
also www.example.org.

## Steps

1. Mix:
   - flour, 500 g
   - water, 350 g
     > cold in summer
2. Wait &amp; fold \\*twice\\*
   1. then again
   2. and rest

- [x] weigh
- [ ] bake

| Flour | Water | Salt |
|:--|--:|:-:|
| rye | | 1 % |
| **wheat** | 70 % | 2 % |

#### Code

\`\`\`python
def loaf(grams: int) -> float:
    # <b>not bold</b> and *not italic*, in a line that is longer than a telephone is wide, so that it has to be moved sideways
    return grams * 0.7
\`\`\`

> Quoted
> lines

---

![a picture](https://example.org/a.png) and the end.`;

const HOSTILE = `<script>window.ran = 1</script><img src=x onerror="window.ran = 2">

<iframe src="https://example.org/"></iframe> **bold <b>not</b>** <a href="javascript:window.ran = 3">x</a>

[a](javascript:window.ran=4) [b](JaVaScRiPt:window.ran=5) [c](data:text/html,<script>window.ran=6</script>) [d](&#106;avascript:window.ran=7)
[e](/api/keys) [f](file:///etc/passwd) [g](<javascript:window.ran=8>) <javascript:window.ran=9> ![h](data:image/svg+xml,<svg/>) [i](vbscript:x)
[j](java\\script:1) [k](//example.org/) [l](https:javascript) [m](https://example.org/" onclick="window.ran=10)

[n]: javascript:1
[n]

| <script>1</script> | [o](javascript:1) |
|---|---|
| <img src=x> | &lt;script&gt; |

\`\`\`<script>
</code></pre><script>window.ran = 11</script>`;

const of = (part, count = 100_000) => part.repeat(Math.ceil(count / part.length));
const LONG = {
  quotes: of(">"),
  "quotes with spaces": of("> "),
  lists: of("- "),
  numbers: of("1. "),
  "open brackets": of("["),
  "brackets, lines of": of(`${of("[", 60)}\n`),
  "closed brackets": `${of("[", 50_000)}${of("]", 50_000)}`,
  "links that do not end": of("[a]("),
  pictures: of("!["),
  stars: of("*a "),
  "stars in words": of("a*_*b_"),
  "emphasis in emphasis": `${of("*a ", 50_000)}${of(" b*", 50_000)}`,
  "emphasis, paragraphs of": of(`${of("*a ", 2400)}${of(" b*", 2400)}\n\n`),
  "stars, paragraphs of": of(`${of("a**b ~~c _d", 4900)}\n\n`),
  backticks: of("`a``b```c"),
  "addresses that do not end": of("<a:"),
  "addresses, paragraphs of": of(`${of("<a:", 4900)}\n\n`),
  ampersands: of("&#"),
  columns: `${of("|a")}|\n${of("|-")}|\n`,
  "spaces under a row": `a|b\n${of(" ")}\n`,
  "dashes under a row": `a|b\n${of("-:", 4900)} |\n`.repeat(20),
  "deeper lists": Array.from({ length: 440 }, (_, depth) => `${" ".repeat(2 * depth % 440)}- a`).join("\n"),
  "deeper quotes": Array.from({ length: 440 }, (_, depth) => `${">".repeat(depth)} a`).join("\n\n"),
  "fences in fences": of("```\n~~~\n"),
  "one line": of("word "),
  "one fence": `\`\`\`\n${of("x = 1\n")}`,
  entities: of("&amp;"),
  escapes: of("\\*"),
};

/** In the page: /api/infer/stream answers with `parts` as tokens, `pause` ms apart; without, all at once. */
function answering({ parts, pause }) {
  const real = window.fetch;
  window.fetch = async (input, init) => {
    if (!String(input.url ?? input).includes("/api/infer/stream")) return real(input, init);
    const event = (name, data) => new TextEncoder().encode(`event: ${name}\ndata: ${JSON.stringify(data)}\n\n`);
    const route = [{ worker_id: "a", name: "node-0", layers: "0-5" }, { worker_id: "b", name: "node-1", layers: "6-11" }];
    const times = { queue_ms: 1, compute_ms: 2, wire_ms: 1, wait_ms: 0 };
    return new Response(
      new ReadableStream({
        async start(stream) {
          stream.enqueue(event("start", { assignments: route, seed: 1, exactness: "E0", prompt_tokens: 9, cached_tokens: 0 }));
          for (const [index, text] of parts.entries()) {
            if (pause) await new Promise((done) => setTimeout(done, pause));
            if (text === "REPAIR") {
              const remaining = [route[0], { worker_id: "c", name: "spare", layers: "6-11" }];
              stream.enqueue(event("reshard", { dropped_worker: "node-1", kind: "kill", reason: "gone", repair_ms: 30, remaining }));
            } else stream.enqueue(event("token_delta", { index, text, hops: [{ compute_ms: index % 3 }, { compute_ms: 1 }], ...times }));
          }
          stream.enqueue(event("done", { timings: {}, finish_reason: "stop" }));
          stream.close();
        },
      }),
      { headers: { "content-type": "text/event-stream" } },
    );
  };
}

/** As tokens are: some letters each. */
const tokens = (text, size = 4) => text.match(new RegExp(`[^]{1,${size}}`, "g"));

export function answers({ told, open, listen, browser, accessible, inBothColours, shot }) {
  async function asked(page, parts, pause = 0) {
    await page.addInitScript(answering, { parts, pause });
    await page.goto(`${told.url}/`);
    await page.waitForSelector(".nodes li");
    await page.fill("textarea", "How is bread made?");
    await page.keyboard.press("Enter");
  }
  const ended = (page) => page.waitForSelector(".figures");

  return {
    async "an answer is formatted, and each piece of it knows its token"() {
      const page = await open("light", 1320, 1400);
      const parts = tokens(SHOWN);
      parts.splice(5, 0, "REPAIR");
      await asked(page, parts);
      await ended(page);
      const count = async (selector) => page.locator(`.formatted ${selector}`).count();
      const counts = { h2: 1, h3: 1, h4: 1, em: 1, strong: 2, del: 1, ol: 2, "ol ol li": 2, "ol ul li": 2, "li blockquote": 1, table: 1, pre: 1, hr: 1, ".task": 2, ".repair": 1 };
      for (const [selector, wanted] of Object.entries(counts)) assert.equal(await count(selector), wanted, selector);
      assert.equal(await count("img"), 0);
      const links = await page.locator(".formatted a").evaluateAll((all) => all.map((one) => [one.textContent, one.href, one.target, one.rel]));
      const safe = ["_blank", "noopener noreferrer"];
      assert.deepEqual(links, [
        ["the mill", "https://example.org/mill", ...safe],
        ["https://example.org/a", "https://example.org/a", ...safe],
        ["www.example.org", "http://www.example.org/", ...safe],
        ["a picture", "https://example.org/a.png", ...safe],
      ]);
      assert.match(await page.textContent(".formatted ol"), /Wait & fold \*twice\*/);
      assert.deepEqual(await page.locator("tbody tr").first().locator("td").allTextContents(), ["rye", "", "1 %"]);
      assert.match(await page.textContent("pre"), /^def loaf\(grams: int\) -> float:\n    # <b>not bold<\/b> and \*not/);
      const pieces = await page.locator(".formatted [data-token]").evaluateAll((all) => all.map((one) => [Number(one.dataset.token), one.textContent]));
      for (const [index, text] of pieces) {
        const sent = parts[index];
        assert.ok(sent.includes(text) || sent.includes("&") || text === "&", `${index}: ${text}`);
      }
      assert.deepEqual(pieces.map(([index]) => index), pieces.map(([index]) => index).sort((a, b) => a - b));
      await page.locator('.formatted [data-token="1"]').first().click();
      assert.match(await page.textContent(".cause"), /^Token 2/);
      await page.context().grantPermissions(["clipboard-read", "clipboard-write"]);
      await page.click("button:has-text('Copy')");
      assert.match(await page.evaluate(() => navigator.clipboard.readText()), /^def loaf[^]*0\.7$/);
      await inBothColours(page, "formatted");
      await page.setViewportSize({ width: 390, height: 1500 });
      assert.ok((await page.evaluate(() => document.documentElement.scrollWidth - innerWidth)) <= 0, "no sideways scrolling");
      await accessible(page, "formatted, narrow");
      await shot(page, "narrow-formatted");
      await page.click("summary");
      await page.selectOption("label:has-text('Show answers') select", { label: "as they came" });
      assert.equal(await page.locator(".text").evaluate((one) => [...one.querySelectorAll("[data-token]")].map((piece) => piece.textContent).join("")), SHOWN);
      await page.context().close();
    },

    async "text that grows ends as text that came at once"() {
      const shown = [];
      for (const [size, pause] of [[SHOWN.length, 0], [1, 1], [3, 30]]) {
        const page = await open("light", 1320, 860);
        await asked(page, tokens(SHOWN, size), pause);
        await ended(page);
        const bare = (root) => root.replace(/<!--.*?-->/gs, "").replace(/<span data-token[^>]*>(.*?)<\/span>/gs, "$1").replace(/<\/?span[^>]*>/g, "");
        shown.push(bare(await page.locator(".formatted").innerHTML()));
        await page.context().close();
      }
      assert.equal(shown[1], shown[0]);
      assert.equal(shown[2], shown[0]);
    },

    async "hostile text is text: nothing runs, nothing is loaded, no other scheme is a link"() {
      const context = await browser.newContext({ viewport: { width: 1320, height: 860 } }); // under the page's policy
      const page = listen(await context.newPage());
      await asked(page, tokens(HOSTILE));
      await ended(page);
      await page.waitForTimeout(300);
      assert.equal(await page.evaluate(() => window.ran), undefined);
      assert.equal(await page.locator(".text :is(script, img, iframe, b, style, form, input, object)").count(), 0);
      const links = await page.locator(".text a").evaluateAll((all) => all.map((one) => one.href));
      for (const link of links) assert.match(link, /^https?:\/\//);
      assert.deepEqual(links, ["http://example.org/", "https://example.org/%22"]);
      const text = await page.textContent(".text");
      for (const part of ["<script>window.ran = 1</script>", 'onerror="window.ran = 2"', "[a](javascript:window.ran=4)", "bold <b>not</b>", "</code></pre><script>"])
        assert.ok(text.includes(part), part);
      await shot(page, "hostile");
      await context.close();
    },

    async "long and deep text does not hold the page up"() {
      const page = await open("light", 1320, 860);
      for (const [name, text] of Object.entries(LONG)) {
        await page.addInitScript(() => {
          window.longest = 0;
          new PerformanceObserver((list) => list.getEntries().forEach((one) => (window.longest = Math.max(window.longest, one.duration)))).observe({ entryTypes: ["longtask"] });
        });
        await asked(page, tokens(text, 5000), 20);
        await ended(page);
        const longest = await page.evaluate(() => new Promise((done) => setTimeout(() => done(window.longest), 50)));
        console.log(`  ${name}: ${longest.toFixed(0)} ms at a time`);
        assert.ok((await page.textContent(".text")).length > 2, name);
        assert.ok(longest < told.longest_ms, `${name}: ${longest} ms`);
      }
      await page.context().close();
    },

    async "an answer of 4,000 tokens grows without long pauses"() {
      const page = await open("light", 1320, 860);
      await page.addInitScript(() => {
        window.gaps = [];
        let last = performance.now();
        const frame = (now) => (window.gaps.push(now - last), (last = now), requestAnimationFrame(frame));
        requestAnimationFrame(frame);
      });
      const text = `${SHOWN}\n\n`.repeat(20);
      await asked(page, tokens(text).slice(0, 4000), 2);
      await page.evaluate(() => (window.gaps.length = 0));
      await ended(page);
      const gaps = (await page.evaluate(() => window.gaps)).sort((a, b) => a - b);
      const at = (part) => gaps[Math.floor(part * (gaps.length - 1))].toFixed(0);
      console.log(`  frames: median ${at(0.5)} ms, 99 % ${at(0.99)} ms, longest ${at(1)} ms`);
      assert.ok(gaps.at(-1) < told.longest_ms);
      await page.context().close();
    },
  };
}
