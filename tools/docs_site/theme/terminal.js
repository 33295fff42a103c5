/* The player of the recorded session: frames hold the lines that changed. It starts by itself where the reader has not
   asked for less motion, and stops at the end; without this script the picture of the last screen stays. */
(function () {
  "use strict";
  var session = window.shardwaySession;
  var place = document.querySelector("[data-session]");
  if (!place || !session || !session.frames.length) return;
  var frames = session.frames, lines = [], timer = 0, next = 0, still = matchMedia("(prefers-reduced-motion: reduce)");
  var screen = document.createElement("pre");
  screen.className = "terminal__screen";
  screen.setAttribute("role", "img");
  screen.setAttribute("aria-label", "A terminal. Commands: " + session.commands.join("; ") + ".");
  for (var number = 0; number < session.rows; number++) {
    var line = document.createElement("span");
    line.className = "terminal__line";
    lines.push(line);
    screen.append(line, "\n");
  }

  function write(line, runs) {
    line.replaceChildren.apply(line, runs.map(function (run) {
      var part = document.createElement("span");
      part.textContent = run[0];
      if (run[1]) part.className = run[1].split(" ").map(function (name) { return "t-" + name; }).join(" ");
      return part;
    }));
  }

  function show(count) {
    for (; next < count; next++) {
      var changed = frames[next][1];
      for (var at in changed) write(lines[at], changed[at]);
    }
  }

  function step() {
    if (next >= frames.length) return stop();
    show(next + 1);
    var wait = next < frames.length ? frames[next][0] - frames[next - 1][0] : 0;
    timer = setTimeout(step, wait);
  }

  function play() {
    if (next >= frames.length) {
      next = 0;
      lines.forEach(function (line) { line.textContent = ""; });
    }
    button.textContent = "Pause";
    step();
  }

  function stop() {
    clearTimeout(timer);
    timer = 0;
    button.textContent = next >= frames.length ? "Play again" : "Play";
  }

  var button = document.createElement("button");
  button.type = "button";
  button.className = "md-button terminal__button";
  button.addEventListener("click", function () { return timer ? stop() : play(); });
  var note = document.createElement("p");
  note.className = "terminal__note";
  var slow = session.commands.map(function (command, at) { return [command, session.faster[at]]; });
  slow = slow.filter(function (each) { return each[1] > 1; });
  note.textContent = "Recorded on " + session.date + " on " + session.machine + ", by tools/docs_site/terminal.py.";
  slow.forEach(function (each) {
    var name = document.createElement("code");
    name.textContent = each[0].split(" ").slice(0, 2).join(" ");
    note.append(" ", name, " is shown " + each[1] + " times as fast.");
  });
  place.replaceChildren(screen, button, note);
  if (still.matches) {
    show(frames.length);
    stop();
  } else {
    play();
  }
  addEventListener("pagehide", stop);
})();
