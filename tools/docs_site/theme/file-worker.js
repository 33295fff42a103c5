/* The search runs in a worker, which a browser does not start for a page that was opened as a file. There a hidden
   frame takes its place: the same script, the same messages. Over http(s) nothing changes. */
(function () {
  "use strict";
  if (location.protocol !== "file:") return;
  function FrameWorker(address) {
    var worker = this, waiting = [];
    worker.onmessage = worker.onerror = worker.onmessageerror = null;
    var frame = document.createElement("iframe");
    frame.hidden = true;
    frame.title = "search";
    document.documentElement.appendChild(frame);
    var scope = frame.contentWindow;
    function deliver(data) {
      scope.onmessage({ data: data });
    }
    worker.postMessage = function (data) {
      if (waiting) waiting.push(data);
      else setTimeout(deliver, 0, data);
    };
    worker.terminate = function () {
      frame.remove();
      waiting = [];
    };
    worker.addEventListener = function (kind, listener) {
      worker["on" + kind] = listener;
    };
    worker.removeEventListener = function () {};
    scope.postMessage = function (data) {
      setTimeout(function () {
        if (worker.onmessage) worker.onmessage({ data: data });
      }, 0);
    };
    var script = scope.document.createElement("script");
    script.src = new URL(address, location.href).href;
    script.onload = function () {
      var held = waiting;
      waiting = null;
      held.forEach(deliver);
    };
    script.onerror = function (error) {
      if (worker.onerror) worker.onerror(error);
    };
    scope.document.documentElement.appendChild(script);
  }
  window.Worker = FrameWorker;
})();
