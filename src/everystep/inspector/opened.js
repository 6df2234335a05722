// A page that was opened from disk: its record lies in it, compressed.
"use strict";
everystepPage(document.getElementById("page"), {
  links: true,
  document: async () => {
    const text = document.getElementById("record").textContent;
    const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(plain).json();
  },
});
