// Runs before the first paint, so that the chosen color scheme applies without a flash.
"use strict";
(function () {
  const kinds = ["", "light", "dark"];
  const names = { "": "system", light: "light", dark: "dark" };
  let chosen = "";
  try { chosen = localStorage.getItem("theme") || ""; } catch { /* storage may be disabled */ }
  function apply() {
    if (chosen) document.documentElement.dataset.theme = chosen;
    else delete document.documentElement.dataset.theme;
    const button = document.querySelector("[data-theme-switch]");
    if (button) {
      button.setAttribute("aria-label", "Color scheme: " + names[chosen]);
      button.title = "Color scheme: " + names[chosen];
    }
    document.dispatchEvent(new Event("themechange"));
  }
  if (!kinds.includes(chosen)) chosen = "";
  apply();
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.querySelector("[data-theme-switch]")?.addEventListener("click", () => {
      chosen = kinds[(kinds.indexOf(chosen) + 1) % kinds.length];
      try { localStorage.setItem("theme", chosen); } catch { /* applies to this page only */ }
      apply();
    });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("themechange")));
})();
