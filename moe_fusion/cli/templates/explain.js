"use strict";
const tails = () => document.querySelectorAll("details.tail");
for (const button of document.querySelectorAll("button[data-open]")) {
  button.addEventListener("click", () => {
    for (const tail of tails()) tail.open = button.dataset.open === "true";
  });
}
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...tails()].filter((tail) => !tail.open);
  for (const tail of closed) tail.open = true;
});
addEventListener("afterprint", () => {
  for (const tail of closed) tail.open = false;
});
