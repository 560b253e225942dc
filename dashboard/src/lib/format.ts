// Numbers and times as people read them. Pure.

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value: number, one: string, many = `${one}s`): string {
  return `${plain.format(value)} ${value === 1 ? one : many}`;
}

export function number(value: number): string {
  return plain.format(value);
}

/** Milliseconds with as many digits as matter: 0 ms, 0.42 ms, 6.4 ms, 120 ms, 2.3 s. */
export function ms(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 ms";
  if (value < 1) return `${value.toFixed(2)} ms`;
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${value.toFixed(0)} ms`;
  return `${(value / 1000).toFixed(value < 10000 ? 1 : 0)} s`;
}

export function seconds(value: number): string {
  return value < 10 ? `${value.toFixed(value < 1 ? 2 : 1)} s` : `${value.toFixed(0)} s`;
}

export function bytes(value: number): string {
  if (!value) return "–";
  if (value >= 1e9) return `${(value / 1e9).toFixed(value < 1e10 ? 1 : 0)} GB`;
  return `${(value / 1e6).toFixed(0)} MB`;
}

export function rate(value: number | null | undefined): string {
  return value ? `${value < 10 ? value.toFixed(1) : value.toFixed(0)} tokens/s` : "–";
}

/** "0-7" as [0, 8). */
export function range(layers: string): [number, number] {
  const [first, last] = layers.split("-").map(Number);
  return [first ?? 0, (last ?? first ?? 0) + 1];
}

/** "0-7" with a real dash; "5" as it is. */
export function layers(text: string): string {
  return text.replace("-", "–");
}

/** Ascending layers as text: 0–3, 7. */
export function runs(found: number[]): string {
  const parts: string[] = [];
  for (let i = 0; i < found.length; ) {
    let j = i;
    while (j + 1 < found.length && found[j + 1] === found[j]! + 1) j++;
    parts.push(i === j ? `${found[i]}` : `${found[i]}–${found[j]}`);
    i = j + 1;
  }
  return parts.join(", ");
}

export function clock(unix_s: number): string {
  return new Date(unix_s * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

export function day(unix_s: number): string {
  return new Date(unix_s * 1000).toLocaleDateString([], { year: "numeric", month: "short", day: "numeric" });
}

export function said(error: unknown): string {
  const text = error instanceof Error ? error.message : String(error);
  return text.charAt(0).toUpperCase() + text.slice(1);
}
