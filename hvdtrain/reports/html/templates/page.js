"use strict";
(function () {
  var root = document.documentElement, tip = document.getElementById("tip");
  function dark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }
  function show(text, x, y) {
    tip.textContent = text;
    tip.style.display = "block";
    var w = tip.offsetWidth, h = tip.offsetHeight;
    tip.style.left = Math.max(6, Math.min(innerWidth - w - 6, x + 14)) + "px";
    tip.style.top = (y + h + 22 > innerHeight ? Math.max(4, y - h - 12) : y + 16) + "px";
  }
  function hide() {
    tip.style.display = "none";
    document.querySelectorAll(".cursor").forEach(function (c) { c.style.display = "none"; });
  }
  function nearest(xs, x) {
    var lo = 0, hi = xs.length - 1;
    while (hi - lo > 1) { var mid = (lo + hi) >> 1; if (xs[mid] < x) lo = mid; else hi = mid; }
    return Math.abs(xs[lo] - x) <= Math.abs(xs[hi] - x) ? lo : hi;
  }
  function words(v) {
    if (v === null || v === undefined) return "none";
    var a = Math.abs(v);
    return a >= 1e4 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4));
  }
  function cursor(figure, event) {
    var area = figure.querySelector(".area"), box = area.getBoundingClientRect();
    if (!figure.found) figure.found = JSON.parse(figure.querySelector("script").textContent);
    var d = figure.found, part = (event.clientX - box.left) / box.width;
    if (part < 0 || part > 1 || !d.s || !d.s.length) { hide(); return; }
    var at = d.x0 + part * (d.x1 - d.x0), first = d.s[0], text = d.xn + " " + words(first.x[nearest(first.x, at)]);
    d.s.slice(0, 9).forEach(function (s) { text += "\n" + s.n + "  " + words(s.y[nearest(s.x, at)]); });
    var line = figure.querySelector(".cursor");
    line.style.left = 100 * part + "%";
    line.style.display = "block";
    show(text, event.clientX, event.clientY);
  }
  function point(event) {
    var target = event.target, told = target.closest && target.closest("[data-tip]");
    if (told) { hide(); show(told.dataset.tip, event.clientX, event.clientY); return; }
    var figure = target.closest && target.closest(".chart");
    if (figure && target.closest(".area")) cursor(figure, event); else hide();
  }
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("scroll", hide, {passive: true});
  document.addEventListener("focusin", function (event) {
    var told = event.target.closest("[data-tip]");
    if (told) { var box = told.getBoundingClientRect(); show(told.dataset.tip, box.left, box.bottom); }
  });
  document.addEventListener("click", function (event) {
    if (!event.target.closest("#theme")) return;
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("hvdtrain-theme", root.dataset.theme); } catch (e) { /* pages from files may keep nothing */ }
  });
  function renew() {
    fetch("body", {cache: "no-store"}).then(function (answer) {
      if (answer.status === 200) return answer.text();
    }).then(function (text) {
      if (text === undefined) return;
      var open = {};
      document.querySelectorAll("details[open] summary").forEach(function (s) { open[s.textContent] = true; });
      var fresh = new DOMParser().parseFromString(text, "text/html");
      document.querySelector("main").replaceWith(fresh.querySelector("main"));
      document.querySelector("footer").textContent = fresh.querySelector("footer").textContent;
      document.title = fresh.title;
      document.querySelectorAll("details").forEach(function (d) {
        if (open[d.querySelector("summary").textContent]) d.open = true;
      });
      hide();
    }).catch(function () {
      document.querySelector("footer").textContent = "The page's server has ended; this is what it showed last.";
    }).finally(function () { setTimeout(renew, 3000); });
  }
  if (document.body.hasAttribute("data-live")) setTimeout(renew, 3000);
})();
