// Answers are Markdown: the blocks of a text that grows, with the token that each piece of it came in. Loaded with the first answer.
// Nothing here makes HTML: parts/Formatted.svelte makes an element of each node, and texts are texts.

import { GFM, parser as commonmark, type MarkdownConfig } from "@lezer/markdown";
import type { SyntaxNode } from "@lezer/common";
import type { Item, RepairItem, TokenItem } from "./chat.svelte";

export type Inline =
  | { kind: "token"; item: TokenItem; text: string }
  | { kind: "repair"; item: RepairItem }
  | { kind: "strong" | "em" | "del" | "code"; inside: Inline[] }
  | { kind: "a"; href: string; inside: Inline[] };

export type Block =
  | { kind: "repairs"; at: number; inside: Inline[] } // after which no text has come
  | { kind: "p"; at: number; inside: Inline[] }
  | { kind: "heading"; at: number; level: number; rank: number; inside: Inline[] } // level: as written; rank: of the outline, from 2
  | { kind: "code"; at: number; language: string; text: string; inside: Inline[] }
  | { kind: "quote"; at: number; blocks: Block[] }
  | { kind: "list"; at: number; start: number | null; items: { at: number; isDone: boolean | null; blocks: Block[] }[] }
  | { kind: "table"; at: number; align: Align[]; rows: Inline[][][] } // the first row is the head
  | { kind: "rule"; at: number };

export type Align = "left" | "center" | "right" | "";

// What is longer or deeper is shown as it is written: a line or paragraph's markup can take the square of its length.
const LONGEST = 5000;
const LONGEST_BLOCK = 300_000;
const DEEPEST_BLOCK = 32; // a list and its item are two
const DEEPEST_INLINE = 8;
// Elements of one answer: the browser lays them out in less than a second. What comes after them is text.
const MOST_ELEMENTS = 5000;
const CODE_ELEMENTS = 8;

const bounds: MarkdownConfig = {
  parseBlock: [
    {
      name: "TooDeep",
      before: "FencedCode",
      parse(context, line) {
        if (context.depth < DEEPEST_BLOCK) return false;
        const from = context.lineStart + line.basePos;
        context.addElement(context.elt("Paragraph", from, context.lineStart + line.text.length));
        context.nextLine();
        return true;
      },
    },
  ],
  parseInline: [{ name: "TooLong", before: "Escape", parse: (context) => (context.end - context.offset > LONGEST ? context.end : -1) }],
  // HTML is text; a line of dashes under a paragraph is a rule, and four spaces mean nothing: as models mean them.
  remove: ["HTMLBlock", "SetextHeading", "IndentedCode", "LinkReference"],
};
const parser = commonmark.configure([GFM, bounds]);

const ENTITIES: Record<string, string> = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", ndash: "–", mdash: "—", hellip: "…", copy: "©", times: "×" };

/** The character that `&name;` or `&#number;` stands for; as it is written if none is known. */
function character(written: string): string {
  const [, base, digits] = /^&#(x?)([\da-f]+);$/i.exec(written) ?? [];
  if (!digits) return ENTITIES[written.slice(1, -1)] ?? written;
  const code = parseInt(digits, base ? 16 : 10);
  return code > 0 && code < 0x110000 ? String.fromCodePoint(code) : written;
}

/** An address that a click may open; null for every other scheme, and for paths. */
function address(written: string): string | null {
  const plain = written.replace(/^<|>$/g, "").replace(/\\(?=[!-/:-@[-`{-~])/g, "");
  const base = /^www\./i.test(plain) ? `//${plain}` : plain;
  if (!/^(https?:)?\/\//i.test(base) || !URL.canParse(base, location.href)) return null;
  return new URL(base, location.href).href;
}

function children(node: SyntaxNode): SyntaxNode[] {
  const found = [];
  for (let child = node.firstChild; child; child = child.nextSibling) found.push(child);
  return found;
}

/** `text` for the parser, of the same length: what is too long of a line is letters. */
function masked(text: string): string {
  return text.replace(/[^\n]+/g, (line) => line.slice(0, LONGEST).padEnd(line.length, "x"));
}

const MARKS = { Emphasis: "em", StrongEmphasis: "strong", Strikethrough: "del" } as const;

/** A text that grows, and its blocks. What a later token cannot change is parsed once. */
export class Growing {
  private text = "";
  private readonly tokens: TokenItem[] = [];
  private readonly ends: number[] = []; // of each token in the text
  private readonly repairs: { at: number; item: RepairItem }[] = [];
  private done: Block[] = [];
  private from = 0; // of the text that is not done
  private tail = ""; // that text: all positions below are in it
  private taken = 0; // items
  private told = 0; // repairs
  private outline: number[] = []; // levels of the headings above
  private elements = 0;
  private isLink = false;

  /** The blocks of `items`, which may only have grown since the last call: those that are done are the same objects. */
  blocks(items: readonly Item[]): Block[] {
    for (; this.taken < items.length; this.taken++) this.take(items[this.taken]!);
    this.tail = this.text.slice(this.from);
    const nodes = this.tail.length > LONGEST_BLOCK ? [] : children(parser.parse(masked(this.tail)).topNode);
    this.finish(nodes);
    const [told, outline, elements] = [this.told, [...this.outline], this.elements];
    const last = nodes.length ? this.all(nodes) : [this.plain(this.tail.search(/\S|$/), this.tail.length)];
    const repaired: Inline[] = [];
    this.tell(Infinity, repaired);
    [this.told, this.outline, this.elements] = [told, outline, elements];
    return [...this.done, ...last, ...(repaired.length ? [{ kind: "repairs" as const, at: -1, inside: repaired }] : [])];
  }

  private take(item: Item): void {
    if (item.kind === "repair") this.repairs.push({ at: this.text.length, item });
    else {
      this.text += item.text;
      this.tokens.push(item);
      this.ends.push(this.text.length);
    }
  }

  /** Leave of `nodes` those that may still change. The first line of the last one tells what it is, and that others have ended. */
  private finish(nodes: SyntaxNode[]): void {
    const last = nodes.at(-1);
    if (!last || nodes.length < 2 || !this.tail.includes("\n", last.from)) return;
    this.done.push(...this.all(nodes.slice(0, -1)));
    const start = this.tail.lastIndexOf("\n", last.from) + 1;
    this.from += start;
    this.tail = this.tail.slice(start);
    nodes.splice(0, nodes.length, ...children(parser.parse(masked(this.tail)).topNode));
  }

  private plain(from: number, to: number): Block {
    const inside: Inline[] = [];
    this.pieces(from, to, inside);
    return { kind: "p", at: this.from + from, inside };
  }

  private all(nodes: SyntaxNode[]): Block[] {
    const found: Block[] = [];
    for (const node of nodes) {
      if (node.name.endsWith("Mark")) continue;
      if (!this.affords(node.name === "FencedCode" ? CODE_ELEMENTS : 1)) return [...found, this.plain(node.from, nodes.at(-1)!.to)];
      found.push(this.block(node));
    }
    return found;
  }

  /** Count elements, if there may be so many more. */
  private affords(count: number): boolean {
    const isFew = this.elements + count <= MOST_ELEMENTS;
    if (isFew) this.elements += count;
    return isFew;
  }

  private block(node: SyntaxNode): Block {
    const at = this.from + node.from;
    const heading = /^ATXHeading(\d)/.exec(node.name);
    if (heading) return { kind: "heading", at, ...this.rank(Number(heading[1])), inside: this.heading(node) };
    switch (node.name) {
      case "FencedCode":
        return this.code(node);
      case "Blockquote":
        return { kind: "quote", at, blocks: this.all(children(node)) };
      case "BulletList":
      case "OrderedList":
        return this.list(node);
      case "Table":
        return this.table(node);
      case "HorizontalRule":
        return { kind: "rule", at };
      default:
        return { kind: "p", at, inside: this.inline(node, node.name === "Task" ? node.from + 4 : node.from, node.to) };
    }
  }

  /** Levels are kept for the eye; a screen reader gets them without gaps. */
  private rank(level: number): { level: number; rank: number } {
    this.outline = [...this.outline.filter((above) => above < level), level];
    return { level, rank: 1 + this.outline.length };
  }

  private heading(node: SyntaxNode): Inline[] {
    const [first, last] = node.getChildren("HeaderMark");
    const to = last?.from ?? node.to;
    const from = Math.min(to, first!.to + this.tail.slice(first!.to, to).search(/\S|$/));
    return this.inline(node, from, from + this.tail.slice(from, to).trimEnd().length);
  }

  private code(node: SyntaxNode): Block {
    const info = node.getChild("CodeInfo");
    const inside: Inline[] = [];
    let text = "";
    for (const { from, to } of node.getChildren("CodeText")) {
      this.pieces(from, to, inside);
      text += this.tail.slice(from, to);
    }
    const language = info ? this.tail.slice(info.from, info.to).split(/\s/)[0]!.slice(0, 40) : "";
    return { kind: "code", at: this.from + node.from, language, text, inside };
  }

  private list(node: SyntaxNode): Block {
    const items: (Block & { kind: "list" })["items"] = [];
    for (const item of node.getChildren("ListItem")) {
      const marker = item.getChild("Task")?.getChild("TaskMarker");
      const isDone = marker ? this.tail[marker.from + 1] !== " " : null;
      const isFew = this.affords(1);
      items.push({ at: this.from + item.from, isDone, blocks: isFew ? this.all(children(item)) : [this.plain(item.from, node.to)] });
      if (!isFew) break;
    }
    const start = node.name === "OrderedList" ? parseInt(this.tail.slice(node.from, node.from + 9)) : null;
    return { kind: "list", at: this.from + node.from, start, items };
  }

  private table(node: SyntaxNode): Block {
    const lines = [...node.getChildren("TableHeader"), ...node.getChildren("TableRow")];
    if (!this.affords(lines.reduce((sum, row) => sum + children(row).length, 0))) return this.plain(node.from, node.to);
    const under = node.getChild("TableDelimiter")!;
    const align = this.tail
      .slice(under.from, under.to)
      .split("|")
      .map((one) => one.trim())
      .filter(Boolean)
      .map((one): Align => (one.endsWith(":") ? (one.startsWith(":") ? "center" : "right") : one.startsWith(":") ? "left" : ""));
    const rows = lines.map((row) => this.cells(row).slice(0, align.length));
    return { kind: "table", at: this.from + node.from, align, rows };
  }

  /** The parser gives no node to an empty cell: two delimiters have one between them. */
  private cells(row: SyntaxNode): Inline[][] {
    const cells: Inline[][] = [];
    let isOpen = this.tail[row.from] !== "|";
    for (const part of children(row)) {
      if (part.name === "TableCell") cells.push(this.inline(part, part.from, part.to));
      else if (isOpen) cells.push([]);
      isOpen = part.name !== "TableCell";
    }
    return cells;
  }

  private inline(node: SyntaxNode, from: number, to: number, depth = 0): Inline[] {
    const found: Inline[] = [];
    let isStart = false; // of a line
    for (const child of children(node)) {
      if (child.from < from || child.to > to) continue;
      this.prose(from, child.from, found, isStart);
      this.one(child, found, depth);
      from = child.to;
      isStart = child.name === "HardBreak" || child.name === "QuoteMark";
    }
    this.prose(from, to, found, isStart);
    return found;
  }

  private one(node: SyntaxNode, found: Inline[], depth: number): void {
    const { name, from, to } = node;
    if (depth > DEEPEST_INLINE || !this.affords(1)) return this.prose(from, to, found);
    const kind = MARKS[name as keyof typeof MARKS];
    if (kind) found.push({ kind, inside: this.inline(node, node.firstChild!.to, node.lastChild!.from, depth + 1) });
    else if (name === "InlineCode") found.push({ kind: "code", inside: this.inlineCode(node) });
    else if (name === "Escape") this.pieces(from + 1, to, found);
    else if (name === "Entity") this.pieces(from, to, found, character(this.tail.slice(from, to)));
    else if (name === "HardBreak") this.pieces(to - 1, to, found);
    else if (name === "Link" || name === "Image" || name === "Autolink" || name === "URL") this.link(node, found, depth + 1);
    else if (name !== "QuoteMark") this.prose(from, to, found);
  }

  private inlineCode(node: SyntaxNode): Inline[] {
    const [from, to] = [node.firstChild!.to, node.lastChild!.from];
    const isPadded = /^ .*\S.* $/s.test(this.tail.slice(from, to)) ? 1 : 0;
    const inside: Inline[] = [];
    this.prose(from + isPadded, to - isPadded, inside);
    return inside;
  }

  /** A link of a scheme that may be opened. Any other is shown as it is written; a picture is a link, and never loaded. */
  private link(node: SyntaxNode, found: Inline[], depth: number): void {
    const url = node.name === "URL" ? node : node.getChild("URL");
    const href = url && address(this.tail.slice(url.from, url.to));
    if (url && !href) return this.prose(node.from, node.to, found);
    if (!href) return void found.push(...this.inline(node, node.from, node.to, depth)); // in brackets, and no link
    const [first, second] = node.getChildren("LinkMark");
    const hasText = node.name !== "URL" && first && second && first.to < second.from;
    const isInner = this.isLink;
    this.isLink = true;
    const inside = this.inline(node, hasText ? first.to : url!.from, hasText ? second.from : url!.to, depth);
    this.isLink = isInner;
    if (isInner) found.push(...inside);
    else found.push({ kind: "a", href, inside });
  }

  /** Text without the spaces that a line begins with. */
  private prose(from: number, to: number, found: Inline[], isStart = false): void {
    for (let at = from; at < to; isStart = true) {
      const end = this.tail.indexOf("\n", at) + 1 || to;
      if (isStart) while (this.tail[at] === " " || this.tail[at] === "\t") at++;
      this.pieces(at, Math.min(end, to), found);
      at = Math.max(at, end);
    }
  }

  /** The text by token, with the repairs before it that are not told yet. */
  private pieces(from: number, to: number, found: Inline[], instead?: string): void {
    for (let at = from, index = this.tokenAt(this.from + from); at < to; index++) {
      const end = Math.min(to, this.ends[index]! - this.from);
      if (end <= at) continue; // a token without text
      this.tell(this.from + at, found);
      found.push({ kind: "token", item: this.tokens[index]!, text: instead ?? this.tail.slice(at, end) });
      at = instead === undefined ? end : to;
    }
  }

  private tell(before: number, found: Inline[]): void {
    for (; this.told < this.repairs.length && this.repairs[this.told]!.at <= before; this.told++)
      found.push({ kind: "repair", item: this.repairs[this.told]!.item });
  }

  /** The first token that ends beyond `place` of the text. */
  private tokenAt(place: number): number {
    let [low, high] = [0, this.ends.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle]! > place) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}
