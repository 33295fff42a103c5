/* A table or a block of code that is wider than the page scrolls sideways; with this, by the keyboard too. */
(function () {
  "use strict";
  function reach() {
    document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code, .md-typeset pre").forEach(function (box) {
      if (box.scrollWidth > box.clientWidth && !box.hasAttribute("tabindex")) {
        box.tabIndex = 0;
        box.setAttribute("role", "region");
        box.setAttribute("aria-label", box.tagName === "DIV" ? "table" : "code");
      }
    });
  }
  addEventListener("load", reach);
  addEventListener("resize", reach);
})();
