// The pages' scripts are classic scripts that share names through globalThis; a page has them all.
import js from "@eslint/js";

const BROWSER = ["addEventListener", "clearTimeout", "document", "history", "location", "queueMicrotask", "setTimeout", "window"];
const CLASSES = ["Option", "ResizeObserver", "URLSearchParams"];
const OWN = ["veilChart", "veilClaims", "veilFamilies", "veilHeatmap", "veilPage", "veilPrivacy", "veilWords"];

export default [
  js.configs.recommended,
  {
    files: ["**/*.js"],
    languageOptions: { sourceType: "script", globals: Object.fromEntries([...BROWSER, ...CLASSES, ...OWN].map((name) => [name, "readonly"])) },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "array-callback-return": "error",
      "consistent-return": "error",
      eqeqeq: "error",
      "no-implicit-globals": "error",
      "no-shadow": "error",
      "no-undef": "error",
      "no-unused-vars": "error",
      "no-var": "error",
      "prefer-const": "error",
      strict: ["error", "global"],
    },
  },
];
