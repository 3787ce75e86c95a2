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
  function data(figure) {
    if (!figure.found) figure.found = JSON.parse(figure.querySelector("script").textContent) || {};
    var d = figure.found;
    if (!figure.view) figure.view = [d.x0, d.x1];
    return d;
  }
  function share(figure, event) {
    var box = figure.querySelector(".area").getBoundingClientRect();
    return (event.clientX - box.left) / box.width;
  }
  function cursor(figure, event) {
    var d = data(figure), part = share(figure, event);
    if (part < 0 || part > 1 || !d.s || !d.s.length) { hide(); return; }
    var at = figure.view[0] + part * (figure.view[1] - figure.view[0]), first = d.s[0];
    var text = d.xn + " " + words(first.x[nearest(first.x, at)]);
    d.s.slice(0, 9).forEach(function (s) { text += "\n" + s.n + "  " + words(s.y[nearest(s.x, at)]); });
    var line = figure.querySelector(".cursor");
    line.style.left = 100 * part + "%";
    line.style.display = "block";
    show(text, event.clientX, event.clientY);
  }
  /* Show the x range [low, high] of a chart: a drag selects it, a double click shows all of it again. */
  function zoom(figure, low, high) {
    var d = data(figure), all = d.x1 - d.x0, part = (low - d.x0) / all, width = (high - low) / all;
    var area = figure.querySelector(".area"), ticks = figure.querySelector(".xt");
    if (!(width > 1e-6)) return;
    figure.view = [low, high];
    if (!figure.ticks) figure.ticks = ticks.innerHTML;
    area.classList.toggle("zoomed", width < 1);
    area.querySelector("svg").setAttribute("viewBox", [1000 * part, 0, 1000 * width, 1000].join(" "));
    area.querySelectorAll(".grid").forEach(function (g) {
      g.setAttribute("d", g.getAttribute("d").replace(/M[^ ]+ ([^H]+)H.*/, "M" + 1000 * part + " $1H" + 1000 * (part + width)));
    });
    area.querySelectorAll(".dot,.mark").forEach(function (i) {
      if (i.at === undefined) i.at = parseFloat(i.style.left) / 100;
      var at = (i.at - part) / width;
      i.style.left = 100 * at + "%";
      i.style.visibility = at < -1e-9 || at > 1 + 1e-9 ? "hidden" : "";
    });
    if (width >= 1) { ticks.innerHTML = figure.ticks; return; }
    ticks.textContent = "";
    [0, 0.25, 0.5, 0.75, 1].forEach(function (at) {
      var span = document.createElement("span");
      span.textContent = words(low + at * (high - low));
      span.style.left = 100 * at + "%";
      if (at === 0 || at === 1) span.className = at ? "end" : "begin";
      ticks.appendChild(span);
    });
  }
  var drag = null;
  function chart(event) {
    var area = event.target.closest && event.target.closest(".chart .area");
    return area && data(area.closest(".chart")).s ? area.closest(".chart") : null;
  }
  function band(event) {
    var to = Math.max(0, Math.min(1, share(drag.figure, event))), box = drag.figure.querySelector(".select").style;
    box.display = "block";
    box.left = 100 * Math.min(drag.from, to) + "%";
    box.width = 100 * Math.abs(to - drag.from) + "%";
    return to;
  }
  document.addEventListener("pointerdown", function (event) {
    var figure = event.button === 0 ? chart(event) : null;
    if (figure) { drag = {figure: figure, from: share(figure, event)}; event.preventDefault(); }
  });
  document.addEventListener("pointermove", function (event) { if (drag) band(event); });
  document.addEventListener("pointerup", function (event) {
    if (!drag) return;
    var to = band(event), figure = drag.figure, from = drag.from, low = figure.view[0], span = figure.view[1] - low;
    drag = null;
    figure.querySelector(".select").style.display = "none";
    if (Math.abs(to - from) > 0.02) zoom(figure, low + Math.min(from, to) * span, low + Math.max(from, to) * span);
  });
  document.addEventListener("pointercancel", function () { /* a touch that scrolls */
    if (drag) drag.figure.querySelector(".select").style.display = "none";
    drag = null;
  });
  document.addEventListener("dblclick", function (event) {
    var figure = chart(event);
    if (figure) zoom(figure, data(figure).x0, data(figure).x1);
  });
  function copy(target) {
    var text = target.textContent, box = target.getBoundingClientRect();
    var field = document.createElement("textarea"); /* pages from files have no clipboard interface */
    field.value = text;
    document.body.appendChild(field);
    field.select();
    var done = document.execCommand("copy");
    field.remove();
    show(done ? "copied" : text, box.left, box.bottom);
  }
  document.addEventListener("keydown", function (event) {
    if (event.key === "Enter" && event.target.matches && event.target.matches("code")) copy(event.target);
  });
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
    if (event.target.closest("code")) copy(event.target.closest("code"));
    if (!event.target.closest("#theme")) return;
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("hvdtrain-theme", root.dataset.theme); } catch (e) { /* pages from files may keep nothing */ }
  });
  function here() {
    var found = null;
    document.querySelectorAll("nav a").forEach(function (a) {
      var section = document.getElementById(a.hash.slice(1));
      a.classList.remove("here");
      if (section && section.getBoundingClientRect().top < innerHeight / 3) found = a;
    });
    if (found) found.classList.add("here");
  }
  document.addEventListener("scroll", here, {passive: true});
  here();
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
      document.querySelector("footer").textContent = "The page's server has ended; this is the last state it served.";
    }).finally(function () { setTimeout(renew, 3000); });
  }
  if (document.body.hasAttribute("data-live")) setTimeout(renew, 3000);
})();
