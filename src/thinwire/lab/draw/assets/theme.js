// What every page has: the theme button and the download.
(() => {
  const byId = (id) => document.getElementById(id);

  // theme: the system's, until the button says otherwise; a file may not be allowed to remember it
  const root = document.documentElement;
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => { byId("theme").textContent = dark() ? "light" : "dark"; };
  try { const kept = localStorage.getItem("thinwire-theme"); if (kept === "light" || kept === "dark") root.dataset.theme = kept; } catch { /* as the system */ }
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("thinwire-theme", root.dataset.theme); } catch { /* until it is closed */ }
    name();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  name();

  // download: the text as it stands in this file
  const blob = new Blob([byId("result").textContent], { type: "application/json" });
  byId("download").href = URL.createObjectURL(blob);
})();
