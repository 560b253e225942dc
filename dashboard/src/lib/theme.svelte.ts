// Light, dark, or as the system has it. Kept in this browser.

export type Theme = "auto" | "light" | "dark";
const STORE = "manyhands.theme";

function stored(): Theme {
  const found = localStorage.getItem(STORE);
  return found === "light" || found === "dark" ? found : "auto";
}

export const theme = $state({ value: stored() });

export function applyTheme(): void {
  if (theme.value === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", theme.value);
}

export function nextTheme(): void {
  theme.value = theme.value === "auto" ? "light" : theme.value === "light" ? "dark" : "auto";
  if (theme.value === "auto") localStorage.removeItem(STORE);
  else localStorage.setItem(STORE, theme.value);
  applyTheme();
}
