import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vite";

// The gateway serves index.html at / and everything else below /page/ (src/manyhands/api/http/page.py).
export default defineConfig({
  plugins: [svelte({ compilerOptions: { css: "external" } })],
  build: {
    outDir: "../src/manyhands/dashboard",
    emptyOutDir: true,
    assetsDir: "page",
    assetsInlineLimit: 0, // the Content-Security-Policy allows files of this origin, and no data: URLs
    modulePreload: { polyfill: false },
    target: "es2022",
    cssCodeSplit: false,
    reportCompressedSize: false,
  },
  server: { proxy: { "/api": "http://127.0.0.1:8000", "/v1": "http://127.0.0.1:8000" } },
});
