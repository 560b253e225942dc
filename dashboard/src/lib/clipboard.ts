// Copying by a button. A page that came neither over TLS nor from this machine has no navigator.clipboard.

/** Put `text` on the clipboard. Throws where the browser does not let this page do so. */
export async function toClipboard(text: string): Promise<void> {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const before = document.activeElement as HTMLElement | null;
  const box = document.createElement("textarea");
  box.className = "hidden";
  box.value = text;
  document.body.append(box);
  box.select();
  const isDone = document.execCommand("copy");
  box.remove();
  before?.focus();
  if (!isDone) throw new Error("this browser does not let the page copy");
}
